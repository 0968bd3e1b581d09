"""nmt: from a raw parallel corpus to a trained, scored Transformer."""
