"""Files that survive a kill, a full disk and shared storage: run folder, checkpoints, logs, locks.
Not what the files mean for training (training/), and no data sets (data/).
"""
