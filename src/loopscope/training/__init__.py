"""Training that can be trusted: optimiser, checkpoints, guards, many processes, and what it will cost."""
