"""What a process asks of its machine: devices, memory, nodes, ports, terminal. Nothing of a run."""
