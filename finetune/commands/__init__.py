"""One folder per command: arguments in, exit code out. What a run itself does is in training/."""
