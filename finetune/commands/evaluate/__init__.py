"""The `eval` command, and `--eval-generate` of a run: scores on records, texts and tasks. The loss
that a run measures while it trains is not here (training/).
"""
