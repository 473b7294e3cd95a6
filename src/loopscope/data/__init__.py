"""Text for training and evaluation: corpora, tokenizers, and packed tokens in a reproducible order."""
