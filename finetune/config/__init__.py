"""Settings: their names, defaults and rules, and how they are read from files and flags. Nothing
here imports torch, queries a device, or knows how a run is executed.
"""
