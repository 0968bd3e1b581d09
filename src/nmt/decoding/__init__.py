"""From source text to translations."""
