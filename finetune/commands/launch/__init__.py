"""The launch command: starts a run's workers and looks after them. No code that a worker runs."""
