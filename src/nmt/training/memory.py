"""Probe the memory of the largest micro-batch before the first step."""

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
    """Return pairs of the most expensive micro-batch of any epoch: similar lengths, as many as `device_tokens` allows.

    Memory grows with the padded tokens, and with the square of the lengths.
    """
    src, tgt = data.src.lengths, data.tgt.lengths
    longer = np.maximum(src, tgt)
    counts = np.bincount(longer)
    # A stable sort of small integers is a radix sort, linear in their number.
    order = np.argsort(longer.astype(np.min_scalar_type(len(counts))), kind="stable")
    # An update has at most so many padded tokens.
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
    """Run the largest possible micro-batch, so that running out of memory shows before the first step.

    Weights, moments and random numbers stay unchanged. With `runtime.device_tokens: auto` the returned trainer has the
    largest limit that fits. Raises OutOfMemory on all processes if any fails.
    """
    finds = trainer.config.runtime.device_tokens == "auto"
    lost = LostContact("another process is out of memory, and reports with which pairs.")
    if trainer.world.size > 1:
        one = np.zeros(1, np.int64)
        failed, error = _probe_together(trainer, data, one)
        if failed:
            raise error or lost
        # DDP rebuilds its buckets between the first and the second backward pass, which changes the order of sums. It
        # happens here, before the first step of a new or resumed training, so that all steps use the final buckets.
        # With a single pair, which all processes agree to fit: this pass exchanges gradients, so a process that ran
        # out of memory in it could not report that to the others.
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
    """Return whether a pass of these pairs fails on any process, and the error of this one."""
    try:
        error = _probe(trainer, data, pairs)
        release_frames(error)  # Its frames hold the tensors of the failed pass.
    finally:
        trainer.zero_grad()
        if trainer.world.device.type == "cuda":
            torch.cuda.empty_cache()
    return trainer.world.sum([float(error is not None)])[0] > 0, error


def _probe(trainer: Trainer, data: ParallelDataset, pairs: Numbers) -> OutOfMemory | None:
    """Run one pass and return its error, if any; while `auto` searches, a tenth of the GPU must stay free."""
    try:
        with oom_context(trainer, data, pairs), trainer.no_sync():
            weights = list(trainer.model.parameters())
            # Before the first step, stand-ins for Adam's moments: as large as two sets of weights.
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
