"""The `verify` command: compares what an engine reads and answers with the trained model. No search
for the fault behind a difference, and no measure of quality (evaluate/).
"""
