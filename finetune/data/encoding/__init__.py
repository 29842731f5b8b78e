"""One conversation to token ids with the mask of what is trained. Not here: files and shards."""
