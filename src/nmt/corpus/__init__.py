"""Stage `clean`: raw files to clean, split text; and `fetch`, which brings a raw corpus here."""

from nmt.corpus.clean_report import print_report
from nmt.corpus.cleaning import NothingLeft, clean_corpus
from nmt.corpus.fetching import fetch
from nmt.corpus.guard import held_out_keys
from nmt.corpus.normalise import Normaliser
from nmt.corpus.reading import find_sources

__all__ = ["Normaliser", "NothingLeft", "clean_corpus", "fetch", "find_sources", "held_out_keys", "print_report"]
