"""A run seen from outside, while it works and afterwards: its files as a view, as events, as texts.
Reads only; what writes these files is in storage/.
"""
