"""Scores of translations; nothing here knows runs or corpora."""
