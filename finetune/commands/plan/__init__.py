"""The `plan` command: shows what a run needs. The formulas are in planning/."""
