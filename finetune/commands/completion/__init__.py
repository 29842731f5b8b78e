"""The `completion` command: shell completion from the schema. No flag is named here again."""
