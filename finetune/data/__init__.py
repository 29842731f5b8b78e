"""Data files to samples and token shards on disk. Not here: batches and tensors (batching/)."""
