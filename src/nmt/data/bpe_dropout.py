"""BPE-dropout (Provilkov et al. 2020): each merge of a vocabulary is left out with a probability."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from nmt.special_tokens import UNK

SPACE = "\u2581"
"""What SentencePiece writes for a space."""


LONGEST_REMEMBERED = 64
"""Characters of the longest unit whose segmentations are remembered; few longer ones ever come twice."""


class Merges:
    """The merges of a model, done here because SentencePiece salts its generator in each process.

    (0.2.3 does: with the same seed another process draws other samples, so no training could go on to the same end.)
    What makes this fast: a line is cut between any two characters that stand side by side in no piece; such units
    come again and again, and so do the ways they are segmented, which are remembered.
    """

    def __init__(self, processor: Any, pieces: Sequence[str]) -> None:
        first_byte = next((i for i in range(len(pieces)) if processor.IsByte(i)), len(pieces))
        normal = [i for i in range(len(pieces)) if not (processor.IsControl(i) or processor.IsByte(i) or i == UNK)]
        # SentencePiece numbers user symbols before the bytes, and the pieces that it learnt after them.
        user = sorted((pieces[i] for i in normal if i < first_byte), key=len, reverse=True)
        self._whole = frozenset(user)
        self._symbols = re.compile("|".join([*map(re.escape, user), "."]), re.DOTALL)
        self._ids = {pieces[i]: i for i in normal}
        self._ranks = {pieces[i]: -processor.GetScore(i) for i in normal if pieces[i] not in self._whole}
        self._bytes = [processor.PieceToId(f"<0x{byte:02X}>") for byte in range(256)]
        neighbours = {ord(a) << 21 | ord(b) for piece in self._ids for a, b in pairwise(piece)}
        # Ends in a number above every pair, so that a search always lands on one.
        self._neighbours = np.array([*sorted(neighbours), np.iinfo(np.int64).max], dtype=np.int64)
        self._remember = lru_cache(maxsize=1 << 18)(lambda unit, skipped: self._segment(unit, iter(skipped)))

    def sample(self, lines: Sequence[str], dropout: float, seed: int) -> list[list[int]]:
        """The ids of each line when each merge is skipped with probability `dropout`."""
        gaps, remember = _gaps(dropout, seed), self._remember
        rows = []
        for units in self._units(lines):
            row: list[int] = []
            for unit in units:
                if len(unit) > LONGEST_REMEMBERED:
                    row.extend(self._segment(unit, accumulate(gaps, lambda at, gap: at + 1 + gap))[0])
                    continue
                ids, tries = remember(unit, ())
                if tries:
                    skipped: tuple[int, ...] = ()
                    at = next(gaps)
                    while at < tries:
                        skipped += (at,)
                        ids, tries = remember(unit, skipped)
                        at += 1 + next(gaps)
                row.extend(ids)
            rows.append(row)
        return rows

    def _units(self, lines: Sequence[str]) -> Iterator[list[str]]:
        """Each line in parts that no piece reaches across."""
        text = "".join(lines).replace(" ", SPACE)
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4").astype(np.int64)
        ends = np.cumsum([len(line) for line in lines], dtype=np.int64)
        cut = np.ones(len(text) + 1, dtype=bool)
        pairs = codes[:-1] << 21 | codes[1:]
        cut[1:-1] = self._neighbours[np.searchsorted(self._neighbours, pairs)] != pairs
        cut[ends] = True
        cuts = np.flatnonzero(cut)
        bounds, last = cuts.tolist(), np.searchsorted(cuts, ends).tolist()
        start = 0
        for line, stop in zip(lines, last, strict=True):
            yield [text[bounds[i] : bounds[i + 1]] for i in range(start, stop)] if line else []
            start = stop

    def _segment(self, unit: str, skips: Iterator[int]) -> tuple[tuple[int, ...], int]:
        """The ids of a unit, and how many merges were tried; of the tries those in `skips` (rising) don't merge.

        As in SentencePiece: the best of all neighbours first, of equals the leftmost; what was skipped once is not
        tried again, but its parts may merge with others.
        """
        parts = self._symbols.findall(unit)
        before, after = list(range(-1, len(parts) - 1)), [*range(1, len(parts)), -1]
        ranks, whole = self._ranks, self._whole
        agenda: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0 and parts[left] not in whole and parts[right] not in whole:
                merged = parts[left] + parts[right]
                rank = ranks.get(merged)
                if rank is not None:
                    heappush(agenda, (rank, left, right, merged))

        for left in range(len(parts) - 1):
            offer(left, left + 1)
        tries, skip = 0, next(skips, -1)
        while agenda:
            _, left, right, merged = heappop(agenda)
            # Either part may have merged with another since, or into another, which leaves nothing in its place.
            if not parts[left] or not parts[right] or parts[left] + parts[right] != merged:
                continue
            tries += 1
            if skip == tries - 1:
                skip = next(skips, -1)
                continue
            parts[left], parts[right] = merged, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return tuple(chain.from_iterable(map(self._ids_of, filter(None, parts)))), tries

    def _ids_of(self, part: str) -> list[int]:
        known = self._ids.get(part)
        return [known] if known is not None else [self._bytes[byte] for byte in part.encode()]


def _gaps(dropout: float, seed: int) -> Iterator[int]:
    """How many merges are done before the next one that is skipped, without end."""
    if not dropout:
        while True:
            yield 1 << 62
    random = np.random.default_rng(seed)
    while True:
        yield from (random.geometric(dropout, size=1 << 14) - 1).tolist()
