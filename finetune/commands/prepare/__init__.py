"""The `prepare` command: its options and its output. The work is done in data/corpus/."""
