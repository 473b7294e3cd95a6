"""One type for each thing that is written to a file: measuring returns it, reading gives it back. No torch here."""
