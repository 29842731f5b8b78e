"""A loaded model and its answers: one prompt or many, whole or as a stream. What a command does
with the answers belongs to commands/.
"""
