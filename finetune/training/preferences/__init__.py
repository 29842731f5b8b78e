"""What runs on preferences alone have: objective, reference and trainer. They are prepared and
built as fine-tuning is (training/prepare.py, build.py).
"""
