"""Models: loaded or made, with their adapters, attention, fused layers and losses. No training
loop.
"""
