"""Running looped models: caches, generation, halting."""
