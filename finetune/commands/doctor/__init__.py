"""The `doctor` command: checks of a machine, and of a run before it starts on it. Not what a run
checks by itself when it starts (training/), and no explanations of failed runs (diagnose/).
"""
