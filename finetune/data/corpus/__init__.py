"""Text files to token shards, and their windows as samples. Not here: conversations."""
