"""Whether an update fits into memory, found out before the first step."""

import logging
import math
from dataclasses import replace

import numpy as np
import torch

from nmt.data.batching import (
    Numbers,
    collate,
)
from nmt.data.dataset import ParallelDataset
from nmt.distributed import gpu_defaults
from nmt.distributed.world import release_frames
from nmt.errors import LostContact
from nmt.training.step import OutOfMemory, Trainer, oom_context

log = logging.getLogger(__name__)


def worst_case_batch(trainer: Trainer, data: ParallelDataset) -> Numbers:
    """Pairs that fill a micro-batch as no other can, in any epoch: alike, and as many as `device_tokens` allows.

    Memory grows with the token slots, and with the square of the lengths besides.
    """
    src, tgt = data.src.lengths, data.tgt.lengths
    longer = np.maximum(src, tgt)
    counts = np.bincount(longer)
    # Small numbers are sorted in time that is linear in their count.
    order = np.argsort(longer.astype(np.min_scalar_type(len(counts))), kind="stable")
    # An update is no larger than this, with its padding.
    limit = min(trainer.device_tokens, math.ceil(gpu_defaults.PADDED * trainer.config.train.batch_tokens))
    best, most, ends = order[-1:], 0.0, np.cumsum(counts)
    for length in np.flatnonzero(counts):
        end = int(ends[length])
        pairs = order[max(0, end - max(1, limit // int(length))) : end]
        widths = (int(src[pairs].max()), int(tgt[pairs].max()))
        size = len(pairs) * sum(n * (1 + n / trainer.config.model.d_model) for n in widths)
        if size > most:
            best, most = pairs, size
    return best


def probe_memory(trainer: Trainer, data: ParallelDataset) -> Trainer:
    """Compute the largest micro-batch there can be, so that what doesn't fit shows before the first step.

    Changes neither weights nor moments nor anybody's random numbers. Where `runtime.device_tokens` is `auto`, the
    trainer that comes back has the largest limit that fits. Raises OutOfMemory, on all processes if on one.
    """
    finds = trainer.config.runtime.device_tokens == "auto"
    lost = LostContact("another process is out of memory, and says with which pairs.")
    if trainer.world.size > 1:
        one = np.zeros(1, np.int64)
        failed, error = _probe_together(trainer, data, one)
        if failed:
            raise error or lost
        # DDP orders its buckets anew between the first and the second backward pass, and sums of more than two numbers
        # depend on that. So it happens here, before the first step of a new training and of one that goes on, and the
        # gradients of all that follows are in the buckets that stay. With a single pair: the processes exchange
        # gradients in it, so one that ran out of memory here could not tell the others: all have agreed that it fits.
        for _ in range(2):
            with oom_context(trainer, data, one):
                _pass(trainer, data, one)
    while True:
        failed, error = _probe_together(trainer, data, worst_case_batch(trainer, data))
        if not failed:
            break
        smaller = trainer.device_tokens * 3 // 4
        if not finds or smaller < int(max(data.src.lengths.max(), data.tgt.lengths.max())):
            raise error or lost
        trainer = replace(trainer, device_tokens=smaller)
    if finds:
        log.info("train: runtime.device_tokens is %s, the largest that fits", f"{trainer.device_tokens:,}")
    return trainer


def _probe_together(trainer: Trainer, data: ParallelDataset, pairs: Numbers) -> tuple[bool, OutOfMemory | None]:
    """Whether a pass of these pairs fails on any process, and what went wrong on this one."""
    try:
        error = _probe(trainer, data, pairs)
        release_frames(error)  # The frames that it came through hold all that was computed until then.
    finally:
        trainer.zero_grad()
        if trainer.world.device.type == "cuda":
            torch.cuda.empty_cache()
    return trainer.world.sum([float(error is not None)])[0] > 0, error


def _probe(trainer: Trainer, data: ParallelDataset, pairs: Numbers) -> OutOfMemory | None:
    """One pass; what went wrong if it does not fit, with a tenth of a GPU to spare if a limit is looked for."""
    try:
        with oom_context(trainer, data, pairs), trainer.no_sync():
            weights = list(trainer.model.parameters())
            # Adam's moments do not exist before the first step; they will take as much again as two sets of weights.
            moments = [] if trainer.optimizer.state else [torch.empty_like(p) for p in (*weights, *weights)]
            _pass(trainer, data, pairs)
            del moments
            if trainer.config.runtime.device_tokens == "auto" and trainer.world.device.type == "cuda":
                total = torch.cuda.get_device_properties(trainer.world.device).total_memory
                if torch.cuda.max_memory_reserved(trainer.world.device) > 0.9 * total:
                    raise torch.OutOfMemoryError("nothing to spare")
    except OutOfMemory as error:
        return error
    finally:
        if trainer.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.world.device)
    return None


def _pass(trainer: Trainer, data: ParallelDataset, pairs: Numbers) -> None:
    batch = collate(*data.take(pairs)).to(trainer.world.device)
    devices = [trainer.world.device] if trainer.world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        with trainer.precision():
            loss, _ = trainer.parallel(batch.src, batch.tgt_in, batch.tgt_out, batch.real)
        (loss * 0.0).backward()
