"""Which samples each step trains, and how each rank takes them. Not here: reading data, models."""
