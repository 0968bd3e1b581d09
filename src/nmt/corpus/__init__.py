"""Stage `clean`: raw files to clean, split text; and `fetch`, which brings a raw corpus here."""

from nmt.corpus.cleaning import clean_corpus
from nmt.corpus.normalise import Normaliser
from nmt.corpus.reading import find_sources

__all__ = ["Normaliser", "clean_corpus", "find_sources"]
