"""Experiments on looped models: the quickstart's 2×2."""
