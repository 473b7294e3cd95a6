"""Our own looped language model: layers, one loop, readouts, and the whole."""
