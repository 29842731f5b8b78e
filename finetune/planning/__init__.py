"""Before a run: its memory, time and traffic, and what `auto` becomes. Reads a configuration and a
model's config.json; no weights, no device, and nothing that trains.
"""
