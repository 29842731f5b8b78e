"""Pairs of answers and labeled answers: how they are read and rendered. Not here: their losses."""
