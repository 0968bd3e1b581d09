"""The leak guard: which rows share a sentence with dev or test, asked before the split and of the written files.

Held-out text is compared in every form that training text may have: as found, normalised, and repaired. Training
text is compared as the model sees it.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nmt.corpus.keys import LEFT, RIGHT, hash_key, leak_key
from nmt.corpus.normalise import Normaliser
from nmt.corpus.pair_repair import Sides, repair_fully
from nmt.corpus.parallel import Workers
from nmt.io import lines_of

BLOCK_LINES = 5_000

Forms = NDArray[np.uint64]
"""Keys of one side: a row for each pair, a column for each of its forms."""


def normalised_and_repaired(sides: Sides, normaliser: Normaliser) -> tuple[Sides, Sides]:
    """Return a pair as `clean` normalises it, and as it then repairs it."""
    one, two = normaliser.han

    def normalise(pair: Sides) -> Sides:
        return normaliser(pair[0], one), normaliser(pair[1], two)

    normal = normalise(sides)
    return normal, repair_fully(normal, normalise)


def _keys(rows: Sequence[Sequence[Sides]]) -> tuple[Forms, Forms]:
    left, right = (
        np.array([[hash_key(side, leak_key(form[side])) for form in forms] for forms in rows], np.uint64)
        for side in (LEFT, RIGHT)
    )
    return left, right


def held_out_keys(pairs: Sequence[Sides], normaliser: Normaliser) -> tuple[Forms, Forms]:
    """Hashed leak keys of both sides of held-out pairs, in all of their forms."""
    return _keys([(sides, *normalised_and_repaired(sides, normaliser)) for sides in pairs])


def _train_keys(pairs: Sequence[Sides]) -> tuple[Forms, Forms]:
    return _keys([(sides,) for sides in pairs])


def leaks(out: Path, normaliser: Normaliser, pool: Workers) -> dict[str, int]:
    """Rows of the written dev and test that share a sentence of either side with train, and of test with dev.

    Also writes the sorted hashes of the training text, 8 bytes a sentence, as `train.LANG.keys`: a run keeps them, so
    that it knows what it was trained on.
    """
    held_out = functools.partial(held_out_keys, normaliser=normaliser)

    def of_files(name: str, keys: Callable[[list[Sides]], tuple[Forms, Forms]]) -> tuple[Forms, Forms]:
        blocks = list(pool.map(keys, _blocks(*(out / f"{name}.{lang}" for lang in normaliser.han))))
        left, right = (np.concatenate(column) for column in zip(*blocks, strict=True))
        return left, right

    train, dev, test = of_files("train", _train_keys), of_files("dev", held_out), of_files("test", held_out)
    for lang, keys in zip(normaliser.han, train, strict=True):
        (out / f"train.{lang}.keys").write_bytes(np.unique(keys).astype("<u8").tobytes())
    return {"dev": _shared(dev, train), "test": _shared(test, train), "between": _shared(test, dev)}


def _shared(held_out: tuple[Forms, Forms], others: tuple[Forms, Forms]) -> int:
    """Pairs of which some form of either side is also a form of one of the others."""
    left, right = (np.isin(one, other).any(axis=1) for one, other in zip(held_out, others, strict=True))
    return int(np.count_nonzero(left | right))


def _blocks(left: Path, right: Path) -> Iterator[list[Sides]]:
    with open(left, "rb") as one, open(right, "rb") as other:
        pairs = ((a, b) for (a, _), (b, _) in zip(lines_of(one), lines_of(other), strict=True))
        while block := list(itertools.islice(pairs, BLOCK_LINES)):
            yield block
