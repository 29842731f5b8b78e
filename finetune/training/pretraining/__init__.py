"""What pretraining alone has: its preparation, parts and trainers. Muon is in training/."""
