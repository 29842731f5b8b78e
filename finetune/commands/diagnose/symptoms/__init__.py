"""The rules of `diagnose`, a file per topic: patterns, causes and fixes. No reading of logs."""
