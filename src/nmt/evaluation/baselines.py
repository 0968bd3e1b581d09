"""What a score is compared with: a nearest-neighbour lookup, and one human translator against the others."""

from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from nmt.errors import DataError
from nmt.evaluation.metrics import Refs, bleu

FEWEST_FOR_HUMAN = 20
"""Lines with several references below which their agreement says nothing."""


def trigrams(text: str) -> set[str]:
    """The runs of three characters of a text; of a shorter one itself."""
    return {text[i : i + 3] for i in range(len(text) - 2)} or {text}


def baseline_translations(train_src: Sequence[str], train_tgt: Sequence[str], srcs: Sequence[str]) -> list[str]:
    """What a lookup table says: the target of the training pair whose source is the most like each of `srcs`.

    Likeness is the Jaccard index of the trigrams; of equals the first pair wins. What a model scores above this it
    has learnt; what it scores below, copying would have given.
    """
    if not train_src:
        raise DataError("there is no training text to look translations up in.")
    wanted = [trigrams(text) for text in srcs]
    places = {gram: array("i") for grams in wanted for gram in grams}
    sizes = np.empty(len(train_src), dtype=np.int64)
    for place, text in enumerate(train_src):
        grams = trigrams(text)
        sizes[place] = len(grams)
        for gram in grams & places.keys():
            places[gram].append(place)
    index = {gram: np.frombuffer(found, dtype=np.intc) for gram, found in places.items() if found}
    none = np.zeros(0, dtype=np.intc)
    found = []
    for grams in wanted:
        hits = np.concatenate([none, *(index[gram] for gram in grams if gram in index)])
        shared = np.bincount(hits, minlength=len(train_src))
        found.append(train_tgt[int(np.argmax(shared / (sizes + len(grams) - shared)))])
    return found


def human_score(refs: Refs, tgt: str) -> dict[str, Any] | None:
    """BLEU of the first reference against the others, where there are others; None when such lines are too few."""
    several = [row for row in refs if len(row) > 1]
    if len(several) < FEWEST_FOR_HUMAN:
        return None
    human = bleu([row[0] for row in several], [row[1:] for row in several], tgt)
    return {"lines": len(several), "bleu": asdict(human)}
