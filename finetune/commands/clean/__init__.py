"""The `clean` command: what recorded runs left on this machine. Not what a run removes by itself
(storage/), and nothing that no run has recorded.
"""
