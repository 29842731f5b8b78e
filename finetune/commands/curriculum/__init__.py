"""The `curriculum` command: what a run would draw. The schedule itself is in batching/."""
