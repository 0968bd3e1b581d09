"""From lengths to updates, from an update to micro-batches, from micro-batches to each process's share.

Pure functions of numbers. What an update holds depends on the lengths, `optim.batch_tokens`, the seed and the epoch
alone; `train.device_tokens` and the number of processes only cut it. So one YAML file is one experiment anywhere.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nmt.symbols import BOS, PAD

Numbers = npt.NDArray[np.int64]

POOL = 2**17
"""Pairs of a shuffled pool that are sorted by length together; bounds memory and keeps a large epoch mixed."""

FEWEST = 16
"""Sentences of a batch, on average, that are not made fewer to have more batches: few rows waste a step's products."""

BESIDES = 4
"""What a sentence costs in translation besides its length, in tokens: measured, small model, 2 cores."""


def by_length(src_lengths: Numbers, tgt_lengths: Numbers) -> Numbers:
    """The order by source length, the target length rising and falling in turn; equal pairs keep their order.

    By source and not by target length: an update whose targets were all equally long would teach the model to end
    there, whatever the source. The turn keeps neighbours alike where the source length steps up, against padding.
    """
    return np.lexsort((np.where(src_lengths % 2 == 1, tgt_lengths, -tgt_lengths), src_lengths))


def plan_updates(src_lengths: Numbers, tgt_lengths: Numbers, batch_tokens: int, seed: int, epoch: int) -> list[Numbers]:
    """The updates of an epoch, each the indices of pairs of similar length; every pair is in exactly one.

    An update is as large as it can be with at most `batch_tokens` real tokens on either side (a longer pair is alone).
    """
    rng = np.random.default_rng([seed, epoch])
    shuffled = rng.permutation(len(src_lengths))
    updates: list[Numbers] = []
    for start in range(0, len(shuffled), POOL):
        pool = shuffled[start : start + POOL]
        pool = pool[by_length(src_lengths[pool], tgt_lengths[pool])]
        sums = [np.concatenate([[0], np.cumsum(lengths[pool])]) for lengths in (src_lengths, tgt_lengths)]
        first = 0
        while first < len(pool):
            last = min(int(np.searchsorted(s, s[first] + batch_tokens, side="right")) - 1 for s in sums)
            last = max(last, first + 1)
            updates.append(pool[first:last])
            first = last
    return [updates[number] for number in rng.permutation(len(updates))]


def area(src_lengths: Numbers, tgt_lengths: Numbers) -> int:
    """Token slots, padding included, of the larger side of a batch."""
    return len(src_lengths) * int(max(src_lengths.max(), tgt_lengths.max()))


def cut(update: Numbers, src_lengths: Numbers, tgt_lengths: Numbers, limit: int, processes: int) -> list[Numbers]:
    """The micro-batches of an update, each with at most `limit` slots on either side (a longer pair is alone).

    They hold about equally many tokens, and their number is a multiple of `processes` where the pairs allow it, so
    that processes which take turns are done together.
    """
    order = update[by_length(src_lengths[update], tgt_lengths[update])]
    cost = np.cumsum(src_lengths[order] + tgt_lengths[order])
    fewest = max(int(lengths[order].sum()) for lengths in (src_lengths, tgt_lengths)) / limit
    count = processes * max(1, math.ceil(fewest / processes))
    while count < len(order):
        # Part i ends where the tokens so far pass i/count of all; a long pair may pass two of these marks at once.
        ends = np.searchsorted(cost, cost[-1] * np.arange(1, count) / count) + 1
        parts = [part for part in np.split(order, np.unique(ends)) if len(part)]
        if all(len(part) == 1 or area(src_lengths[part], tgt_lengths[part]) <= limit for part in parts):
            return parts
        count += processes
    return [order[i : i + 1] for i in range(len(order))]


def share(micro_batches: Sequence[Numbers], rank: int, size: int) -> list[tuple[int, Numbers]]:
    """The micro-batches that process `rank` of `size` computes, with their numbers in the update.

    Every process gets equally many. Where there are too few, some get number -1: the first one, to be given weight
    zero, so that no process waits for another.
    """
    rounds = -(-len(micro_batches) // size)
    mine = range(rank, rounds * size, size)
    return [(i, micro_batches[i]) if i < len(micro_batches) else (-1, micro_batches[0]) for i in mine]


@dataclass(frozen=True)
class Batch:
    """Pairs as padded token ids, [B, S] and [B, T]; the source ends with eos, the target's input begins with bos."""

    src: Tensor
    tgt_in: Tensor
    tgt_out: Tensor
    real: Tensor
    """Places of the real target tokens, [N], in `tgt_out` laid out flat; so no device is asked where they are."""
    tokens: int
    """Real tokens of both sides."""
    slots: int
    """Token slots of both sides, padding included."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        if device.type == "cpu":
            return self
        src, tgt_in, tgt_out, real = (
            ids.pin_memory().to(device, non_blocking=True) for ids in (self.src, self.tgt_in, self.tgt_out, self.real)
        )
        return Batch(src, tgt_in, tgt_out, real, self.tokens, self.slots)


def pad(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Rows of ids as one matrix as wide as the longest, filled up with pad."""
    matrix = np.full((len(rows), max(len(row) for row in rows)), PAD, dtype=np.int64)
    for number, row in enumerate(rows):
        matrix[number, : len(row)] = row
    return matrix


def collate(src: Sequence[npt.NDArray[Any]], tgt: Sequence[npt.NDArray[Any]]) -> Batch:
    """A batch from rows of ids that end with eos."""
    src_ids, tgt_out = pad(src), pad(tgt)
    tgt_in = np.full_like(tgt_out, BOS)
    tgt_in[:, 1:] = tgt_out[:, :-1]
    # The eos of a shorter row would stand before its padding; it is no input, since nothing follows it.
    tgt_in[:, 1:][tgt_out[:, 1:] == PAD] = PAD
    tokens = sum(map(len, src)) + sum(map(len, tgt))
    arrays = (src_ids, tgt_in, tgt_out, np.flatnonzero(tgt_out != PAD))
    src_BS, tgt_BT, out_BT, real_N = (torch.from_numpy(array) for array in arrays)
    return Batch(src_BS, tgt_BT, out_BT, real_N, tokens, src_ids.size + tgt_out.size)


def padding_share(micro_batches: Sequence[Numbers], src_lengths: Numbers, tgt_lengths: Numbers) -> float:
    """The share of token slots, over both sides, that hold padding."""
    real = slots = 0
    for part in micro_batches:
        for lengths in (src_lengths[part], tgt_lengths[part]):
            real += int(lengths.sum())
            slots += len(part) * int(lengths.max())
    return 1 - real / slots if slots else 0.0


def batches(lengths: Sequence[int], rows: int, most: int, together: int = 1) -> list[list[int]]:
    """The places of all lengths, the longest first, in batches whose count × longest × `rows` is at most `most`.

    What is alone too large is a batch of its own. The longest come first, so that what does not fit shows at once.
    Their number is a multiple of `together` where they still have FEWEST lengths on average, and they are about
    equally large: so those who work on them are done at the same time, however few batches there are.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])

    def cuts(limit: int) -> list[int]:
        starts = [0]
        while starts[-1] < len(order):
            longest = max(1, lengths[order[starts[-1]]])
            fit = min(most // (longest * rows), limit // (longest + BESIDES))
            starts.append(min(starts[-1] + max(1, fit), len(order)))
        return starts

    whole = sum(length + BESIDES for length in lengths) + most
    needed = len(cuts(whole)) - 1
    wanted = max(needed, min(-(-needed // together) * together, len(order) // FEWEST))
    # The smallest limit with so few batches is the one that makes them equal.
    limit = bisect_left(range(whole), True, key=lambda limit: len(cuts(limit)) - 1 <= wanted)
    return [order[start:end] for start, end in itertools.pairwise(cuts(limit))]
