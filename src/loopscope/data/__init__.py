"""Text for training and evaluation."""
