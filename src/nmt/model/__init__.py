"""The Transformer, its loss, and what it costs."""
