"""What a trained model is good for: measuring it, and using it to write (generate.py) or fill gaps (fill_mask.py)."""
