"""The rules of `diagnose`, one per symptom: see base.py for their form and rules.py for all of them."""
