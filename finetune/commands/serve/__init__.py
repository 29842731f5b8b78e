"""An OpenAI-compatible server: the protocol, the guard in front of it, and its worker processes.
How an answer is generated belongs to finetune/inference.
"""
