"""The `monitor` command: a run in a terminal, live, and as JSON. How a run's files are read is in
runs/.
"""
