"""The `checkpoints` command: lists, verifies and deletes. How they are written: storage/."""
