"""The `merge` command: an adapter merged into its base, tested, with a model card, as a folder or
GGUF. Nothing that serves the result (serve/), and no comparison with an engine (verify/).
"""
