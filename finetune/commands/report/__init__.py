"""The `report` command: one HTML page about a run. Labels and markup are in the templates; how a
run's files are read is in runs/.
"""
