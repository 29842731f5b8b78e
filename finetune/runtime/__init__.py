"""The machine as a process sees it: devices, memory, nodes, ports, terminal. Nothing about a
run.
"""
