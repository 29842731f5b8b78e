"""The version of the package, and its name on the package index."""

__version__ = "0.2.0"

# `finetune` belongs to another project there.
DISTRIBUTION = "finetune-lm"
