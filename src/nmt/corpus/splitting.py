"""Groups of pairs that share a sentence, and the choice of dev and test; a sentence is the hash of its leak key.

A corpus with several translations of a sentence leaks when its rows are split one by one. Here the pairs that are
connected by shared sentences on either side form a group, and a group goes into one set as a whole.
"""

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nmt.errors import DataError

Keys = NDArray[np.uint64]
Rows = NDArray[np.int64]


def first_of_equal(keys: Keys) -> NDArray[np.bool_]:
    """For each key whether it is the first of its kind."""
    found = np.zeros(len(keys), dtype=bool)
    found[np.unique(keys, return_index=True)[1]] = True
    return found


def connected_groups(left: Keys, right: Keys) -> Rows:
    """For each row the number of its group: rows with an equal key on either side are in one, and so on onwards.

    Groups are numbered from 0 without gaps. Union-find on whole arrays: every root hooks onto the smallest root that a
    row connects it with, and paths are halved until nothing moves (after Shiloach and Vishkin 1982).
    """
    _, a = np.unique(left, return_inverse=True)
    _, b = np.unique(right, return_inverse=True)
    if not len(a):
        return np.zeros(0, dtype=np.int64)
    b = b + a.max() + 1
    parent = np.arange(b.max() + 1)
    while True:
        roots_a, roots_b = parent[a], parent[b]
        if np.array_equal(roots_a, roots_b):
            return np.unique(roots_a, return_inverse=True)[1].astype(np.int64)
        np.minimum.at(parent, np.maximum(roots_a, roots_b), np.minimum(roots_a, roots_b))
        while not np.array_equal(parent, grand := parent[parent]):
            parent = grand


class Split(NamedTuple):
    """Rows of each set; `groups` is the number of the group of every row."""

    groups: Rows
    test: Rows
    dev: Rows
    held: NDArray[np.bool_]
    """For each row whether its group is in test or dev; such rows are never trained on."""


def split_groups(left: Keys, right: Keys, test_size: int, dev_size: int, seed: int) -> Split:
    """One row of each of `test_size` groups, then of `dev_size` others, in an order that only the text and seed decide.

    Groups come in the order of a hash of (seed, smallest key), rows of a group by their keys, then as they came.
    """
    groups = connected_groups(left, right)
    count = int(groups.max()) + 1 if len(groups) else 0
    for name, size in (("test_size", test_size), ("dev_size", dev_size)):
        if size > count // 10:
            raise DataError(
                f"clean.{name} is {size:,}, more than a tenth of the {count:,} groups of pairs that share a sentence; "
                + (f"{count // 10:,} would work." if count >= 10 else "the corpus is too small to be split.")
            )
    smallest = np.full(count, np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(smallest, groups, left)
    salt = b"%d:" % seed
    hashed = [hashlib.blake2b(salt + key.tobytes(), digest_size=8).digest() for key in smallest.astype("<u8")]
    order = np.argsort(np.frombuffer(b"".join(hashed), dtype=">u8"), kind="stable")
    by_group = np.lexsort((right, left, groups))
    first = by_group[np.searchsorted(groups[by_group], np.arange(count))]
    chosen = order[: test_size + dev_size]
    return Split(groups, first[chosen[:test_size]], first[chosen[test_size:]], np.isin(groups, chosen))


def random_leak(left: Keys, right: Keys, size: int) -> tuple[float, float, float]:
    """Of `size` rows drawn one by one, the share whose left, right, or either sentence is also in a row not drawn.

    Expected shares, exactly: of a row that shares a sentence with c others, all c are drawn too with the probability
    (size-1)/(n-1) * (size-2)/(n-2) * ..., c factors.
    """
    rows = len(left)
    if not 0 < size < rows:
        return 0.0, 0.0, 0.0
    one, other = (np.unique(keys, return_inverse=True)[1].astype(np.int64) for keys in (left, right))
    in_left, in_right, in_both = map(_sharing, (one, other, one * (other.max() + 1) + other))
    drawn = np.arange(1, int((in_left + in_right).max()) + 1)
    all_drawn = np.cumprod(np.maximum(size - drawn, 0) / np.maximum(rows - drawn, 1))
    safe = np.concatenate([[1.0], all_drawn])
    found = [float(1 - safe[others].mean()) for others in (in_left, in_right, in_left + in_right - in_both)]
    return found[0], found[1], found[2]


def _sharing(keys: Rows) -> Rows:
    """For each row how many others have its key."""
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return (counts - 1)[inverse]
