"""Experiments on looped models: the quickstart's 2×2, and the paper's grid with its claims."""
