"""What a looped model is trained on: cross-entropy over loops, its placement, and terms that see scale."""
