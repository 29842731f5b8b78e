"""A run prepared, built, executed, saved and resumed. What computes a loss or loads a model is in
modeling/; what belongs to one kind of run alone is in pretraining/ and preferences/.
"""
