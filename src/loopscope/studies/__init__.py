"""Studies: the paper and its claims, the atlas, Ouro, laws of loops. What to run, and which views to make of it."""
