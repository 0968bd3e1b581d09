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


def random_leak(left: Keys, right: Keys, size: int, seed: int) -> tuple[float, float, float]:
    """Of `size` rows drawn one by one, the share whose left, right, or either sentence is also in the other rows."""
    drawn = np.zeros(len(left), dtype=bool)
    drawn[np.random.default_rng(seed).permutation(len(left))[:size]] = True
    if not drawn.any():
        return 0.0, 0.0, 0.0
    in_left = np.isin(left[drawn], left[~drawn])
    in_right = np.isin(right[drawn], right[~drawn])
    return float(in_left.mean()), float(in_right.mean()), float((in_left | in_right).mean())
