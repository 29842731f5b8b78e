"""Which data files there are, and their records one by one. Not here: what a record means."""
