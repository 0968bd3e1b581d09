"""From lengths to updates, from an update to micro-batches, from micro-batches to each process's share.

Pure functions of numbers. What an update holds depends on the lengths, `train.batch_tokens`, `train.length_buckets`,
the seed and the epoch alone; `runtime.device_tokens`, the kind of device and the number of processes only cut it. So
one YAML file is one experiment anywhere.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nmt.special_tokens import BOS, PAD

Numbers = npt.NDArray[np.int64]

WINDOW = 2**17
"""Pairs of an epoch that are planned together; bounds the time to the first update and keeps a large epoch mixed."""

CHUNK = 256
"""Tokens that an update has of each bucket where the number of buckets is not given, up to 8 of them."""

OVERHEAD = {"cpu": 64, "cuda": 16_384}
"""What a micro-batch costs besides its token slots, in slots of both sides; on a GPU the launch of its kernels."""

MIN_BATCH = 16
"""Sentences of a batch, on average, that are not made fewer to have more batches: few rows waste a step's products."""

PAIR_OVERHEAD = 4
"""What a sentence costs in translation besides its length, in tokens: measured, small model, 2 cores."""


def length_order(src_lengths: Numbers, tgt_lengths: Numbers) -> Numbers:
    """The order by source length, the target length rising and falling in turn; equal pairs keep their order.

    By source and not by target length: an update whose targets were all equally long would teach the model to end
    there, whatever the source. The turn keeps neighbours alike where the source length steps up, against padding.
    """
    return np.lexsort((np.where(src_lengths % 2 == 1, tgt_lengths, -tgt_lengths), src_lengths))


def windows(pairs: int, seed: int, epoch: int) -> Iterator[Numbers]:
    """The pairs of an epoch in an order of its own, cut into windows."""
    shuffled = np.random.default_rng([seed, epoch]).permutation(pairs)
    for start in range(0, pairs, WINDOW):
        yield shuffled[start : start + WINDOW]


def plan_updates(
    window: Numbers, src_lengths: Numbers, tgt_lengths: Numbers, batch_tokens: int, buckets: int, seed: Sequence[int]
) -> list[Numbers]:
    """The updates of a window, each the indices of its pairs; every pair of the window is in exactly one.

    The pairs, sorted by length, are cut into chunks of at most batch_tokens / buckets real tokens on either side (a
    longer pair is alone), and neighbouring chunks make a bucket. An update takes one chunk of each bucket by chance:
    so it has short and long sentences, as the corpus has, and each chunk can be computed almost without padding. None
    has more than `batch_tokens` on either side, but a pair that has more itself. 0 buckets: one for every CHUNK tokens.
    """
    buckets = buckets or min(8, max(1, batch_tokens // CHUNK))
    rng = np.random.default_rng(seed)
    order = window[length_order(src_lengths[window], tgt_lengths[window])]
    sides = [lengths[order] for lengths in (src_lengths, tgt_lengths)]
    chunks = _chunks(sides, max(1, batch_tokens // buckets))
    count = -(-len(chunks) // buckets)
    shuffled = [rng.permutation(len(chunks[first : first + count])) + first for first in range(0, len(chunks), count)]
    updates: list[Numbers] = []
    for row in itertools.zip_longest(*shuffled):
        taken: list[slice] = []
        for chunk in (chunks[number] for number in row if number is not None):
            if taken and any(sum(int(side[part].sum()) for part in (*taken, chunk)) > batch_tokens for side in sides):
                updates.append(np.concatenate([order[part] for part in taken]))
                taken = []
            taken.append(chunk)
        updates.append(np.concatenate([order[part] for part in taken]))
    return [updates[number] for number in rng.permutation(len(updates))]


def _chunks(sides: Sequence[Numbers], tokens: int) -> list[slice]:
    """Neighbours in order, as many as have at most so many tokens on each side; one that has more is alone."""
    sums = [np.concatenate([[0], np.cumsum(side)]) for side in sides]
    chunks, first = list[slice](), 0
    while first < len(sides[0]):
        last = min(int(np.searchsorted(s, s[first] + tokens, side="right")) - 1 for s in sums)
        chunks.append(slice(first, max(last, first + 1)))
        first = chunks[-1].stop
    return chunks


def plan_epoch(
    src_lengths: Numbers, tgt_lengths: Numbers, batch_tokens: int, buckets: int, seed: int, epoch: int, first: int = 0
) -> Iterator[list[Numbers]]:
    """The updates of each window of an epoch, from window `first` on; planned one by one."""
    for number, window in enumerate(windows(len(src_lengths), seed, epoch)):
        if number >= first:
            yield plan_updates(window, src_lengths, tgt_lengths, batch_tokens, buckets, [seed, epoch, 1 + number])


def count_updates(src_lengths: Numbers, tgt_lengths: Numbers, batch_tokens: int, buckets: int, seed: int) -> int:
    """Updates of an epoch, if all its pairs have as many as a window of them, spread evenly over the corpus."""
    window = np.arange(0, len(src_lengths), -(-len(src_lengths) // WINDOW))
    updates = plan_updates(window, src_lengths, tgt_lengths, batch_tokens, buckets, [seed, 0, 1])
    return round(len(updates) * len(src_lengths) / len(window))


def padded_size(src_lengths: Numbers, tgt_lengths: Numbers) -> int:
    """Token slots, padding included, of the larger side of a batch."""
    return len(src_lengths) * int(max(src_lengths.max(), tgt_lengths.max()))


def fill(
    order: Numbers, src_lengths: Numbers, tgt_lengths: Numbers, limit: int, most: float = math.inf
) -> list[Numbers]:
    """Pairs in order of their source length as batches of neighbours, each as large as it may be.

    It may have `limit` token slots on its larger side and `most` on both together; a pair that has more is alone.
    """
    src, tgt = src_lengths[order], tgt_lengths[order]
    parts, first = list[Numbers](), 0
    while first < len(order):
        end = first + max(1, limit // int(src[first]))
        longest_src, longest_tgt = src[first:end], np.maximum.accumulate(tgt[first:end])
        rows = np.arange(1, len(longest_src) + 1)
        fit = np.searchsorted(rows * np.maximum(longest_src, longest_tgt), limit, side="right")
        fit = min(fit, np.searchsorted(rows * (longest_src + longest_tgt), most, side="right"))
        parts.append(order[first : first + max(1, int(fit))])
        first += len(parts[-1])
    return parts


def slots(src_lengths: Numbers, tgt_lengths: Numbers) -> int:
    """The padded tokens of a batch, both sides together."""
    return len(src_lengths) * int(src_lengths.max() + tgt_lengths.max())


def split_micro_batches(
    update: Numbers, src_lengths: Numbers, tgt_lengths: Numbers, limit: int, processes: int, overhead: int
) -> list[Numbers]:
    """The micro-batches of an update, each with at most `limit` slots on either side (a longer pair is alone).

    They are neighbours by length and about equally large, so that processes which take turns are done together. Their
    number is the one that takes the least time: few have more padding, many cost `overhead` slots each.
    """
    order = update[length_order(src_lengths[update], tgt_lengths[update])]
    src, tgt = int(src_lengths[order].sum()), int(tgt_lengths[order].sum())
    filled = partial(fill, order, src_lengths, tgt_lengths, limit)
    best, least, rounds = list[Numbers](), math.inf, math.ceil(max(src, tgt) / limit / processes)
    while True:
        count = rounds * processes
        # The smallest size, to two per cent, with which so few parts hold all pairs: so they are equally large.
        sizes = [*((src + tgt) / count * 2 ** (np.arange(64) / 32)), math.inf]
        size = bisect_left(sizes, True, key=lambda most: len(filled(most)) <= count)
        if size < len(sizes):  # Else the limit needs more parts.
            parts = filled(sizes[size])
            costs = [slots(src_lengths[part], tgt_lengths[part]) + overhead for part in parts]
            time = max(sum(costs[rank::processes]) for rank in range(processes))
            if time >= least:
                return best
            best, least = parts, time
        rounds += 1


def shard(micro_batches: Sequence[Numbers], rank: int, size: int) -> list[tuple[int, Numbers]]:
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

    def pinned(self, device: torch.device) -> "Batch":
        """The same batch in memory from which it is copied to this device while the host goes on."""
        if device.type != "cuda":
            return self
        with torch.cuda.device(device):  # A thread begins with the first GPU, and pinning would take memory there.
            return self._each(lambda ids: ids.pin_memory())

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device; nothing waits for a copy from pinned memory."""
        return self if device.type == "cpu" else self._each(lambda ids: ids.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        src, tgt_in, tgt_out, real = map(change, (self.src, self.tgt_in, self.tgt_out, self.real))
        return Batch(src, tgt_in, tgt_out, real, self.tokens, self.slots)


def collate(src_ids: npt.NDArray[np.int64], tgt_ids: npt.NDArray[np.int64]) -> Batch:
    """A batch from both sides of its pairs as matrices of ids, whose rows end with eos and are filled up with pad."""
    tgt_in = np.full_like(tgt_ids, BOS)
    tgt_in[:, 1:] = tgt_ids[:, :-1]
    # The eos of a shorter row would stand before its padding; it is no input, since nothing follows it.
    tgt_in[:, 1:][tgt_ids[:, 1:] == PAD] = PAD
    real = np.flatnonzero(tgt_ids != PAD)
    tokens = int(np.count_nonzero(src_ids != PAD)) + len(real)
    src_BS, tgt_BT, out_BT, real_N = (torch.from_numpy(array) for array in (src_ids, tgt_in, tgt_ids, real))
    return Batch(src_BS, tgt_BT, out_BT, real_N, tokens, src_ids.size + tgt_ids.size)


def padding_share(micro_batches: Sequence[Numbers], src_lengths: Numbers, tgt_lengths: Numbers) -> float:
    """Return the share of padding in the padded tokens of both sides."""
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
            fit = min(most // (longest * rows), limit // (longest + PAIR_OVERHEAD))
            starts.append(min(starts[-1] + max(1, fit), len(order)))
        return starts

    whole = sum(length + PAIR_OVERHEAD for length in lengths) + most
    needed = len(cuts(whole)) - 1
    wanted = max(needed, min(-(-needed // together) * together, len(order) // MIN_BATCH))
    # The smallest limit with so few batches is the one that makes them equal.
    limit = bisect_left(range(whole), True, key=lambda limit: len(cuts(limit)) - 1 <= wanted)
    return [order[start:end] for start, end in itertools.pairwise(cuts(limit))]
