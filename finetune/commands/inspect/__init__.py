"""The `inspect` command: samples as the model sees them, and the audit of the data. Making samples
is in data/.
"""
