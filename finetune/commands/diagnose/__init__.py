"""The `diagnose` command: causes of failures from logs. No check of a machine (doctor/)."""
