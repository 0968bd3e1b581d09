"""One update of the weights, and the loss of the dev set: the arithmetic of training, without files.

Shapes: B sentences, S source tokens, T target tokens, D model width, V vocabulary, N non-padding target tokens.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nmt.config import Config
from nmt.data.batching import (
    OVERHEAD,
    Batch,
    Numbers,
    collate,
    fill,
    length_order,
    padding_share,
    shard,
    split_micro_batches,
)
from nmt.data.dataset import ParallelDataset
from nmt.distributed import gpu_defaults
from nmt.distributed.world import World, gpu_of, limit_onednn_cache, wrap_ddp
from nmt.errors import NmtError, counted
from nmt.model.flops import training_flops
from nmt.model.loss import label_smoothed_loss
from nmt.model.transformer import Transformer
from nmt.training.optimizer import build_optimizer, learning_rate, set_learning_rate

log = logging.getLogger(__name__)

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class NoHeartbeat:
    """A heartbeat that writes nothing; see nmt.training.watchdog.Heartbeat."""

    def __call__(self, doing: str, rows: Sequence[int] | Numbers = (), step: int | None = None) -> None:
        """Record what this process does, with which lines of the training text."""


@dataclass(frozen=True)
class StepStats:
    """Measurements of one update on this process; tensors, so that no step waits for the device."""

    loss: Tensor
    nll: Tensor
    grad_norm: Tensor
    skipped: Tensor
    """1 if the step was skipped because of a non-finite gradient, else 0."""
    rate: float
    tgt_tokens: int
    tokens: int
    flops: float
    padding: float
    seconds: dict[str, float]


class TrainingModel(nn.Module):
    """The model and its loss as one forward pass, which DDP wraps."""

    def __init__(self, model: Transformer, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, src_BS: Tensor, tgt_BT: Tensor, tgt_out_BT: Tensor, real_N: Tensor) -> tuple[Tensor, Tensor]:
        """Label-smoothed loss and nll in nats, summed over the non-padding target tokens; see Batch."""
        hidden_ND = self.model(src_BS, tgt_BT).flatten(0, 1).index_select(0, real_N)
        target_N = tgt_out_BT.flatten().index_select(0, real_N)
        return label_smoothed_loss(hidden_ND, self.model.embedding.weight, target_N, self.smoothing)


@dataclass(frozen=True)
class Trainer:
    """The parts of a training that stay the same from step to step."""

    config: Config
    """With `auto` resolved, except for `runtime.device_tokens` on a GPU."""
    world: World
    model: Transformer
    parallel: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    """For float16; disabled in other precisions."""
    device_tokens: int
    """`runtime.device_tokens`, or the value that `auto` has found."""
    at: NoHeartbeat
    """Records the position of the training."""

    @staticmethod
    def build(config: Config, world: World, vocab_sizes: tuple[int, int], at: NoHeartbeat | None = None) -> "Trainer":
        """Build a new model and optimizer, equal on all processes."""
        gpu = gpu_of(world.device)
        config = gpu_defaults.for_training(config, gpu)
        torch.manual_seed(config.train.seed)
        model = Transformer(config.model, vocab_sizes[1], None if config.bpe.shared_vocab else vocab_sizes[0])
        model.to(world.device)
        limit_onednn_cache(world.device, config.train.precision, 64)
        training_model = TrainingModel(model, config.train.label_smoothing)
        optimizer = build_optimizer(model, config.optim)
        if config.runtime.compile:
            # Layer by layer: a model compiled as a whole has all gradients at the end of its backward pass, so DDP
            # could not overlap the exchange. Not the loss: its loop over chunks would be unrolled, and recompiled for
            # each number of chunks.
            for layer in (*model.encoder, *model.decoder_layers):
                layer.compile(dynamic=True)
        scaler = torch.amp.GradScaler(world.device.type, enabled=config.train.precision == "float16")
        limit = gpu_defaults.device_tokens(config.runtime.device_tokens, config.train.batch_tokens, world.size, gpu)
        return Trainer(
            config, world, model, wrap_ddp(training_model, world), optimizer, scaler, limit, at or NoHeartbeat()
        )

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast context of a forward pass."""
        if self.config.train.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, dtype=PRECISIONS[self.config.train.precision])

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a backward pass whose gradients are not exchanged yet."""
        return self.parallel.no_sync() if self.world.size > 1 else contextlib.nullcontext()  # type: ignore[operator]

    def zero_grad(self) -> None:
        """Zero the gradients.

        With DDP they stay allocated, in its buckets; otherwise gradients that are accumulated without an exchange would
        be a second set beside them.
        """
        self.optimizer.zero_grad(set_to_none=self.world.size == 1)


def micro_batches(trainer: Trainer, data: ParallelDataset, update: Numbers) -> list[Numbers]:
    """Split an update for the given processes and devices; see nmt.data.batching."""
    overhead = OVERHEAD.get(trainer.world.device.type, OVERHEAD["cpu"])
    return split_micro_batches(
        update, data.src.lengths, data.tgt.lengths, trainer.device_tokens, trainer.world.size, overhead
    )


@dataclass(frozen=True)
class MicroBatch:
    """The pairs of one forward pass."""

    number: int
    """In the update, from 0; -1 for a copy of another process's, computed with weight zero."""
    pairs: Numbers
    rows: Numbers
    """Their lines in the training text, from 0."""
    batch: Batch


@dataclass(frozen=True)
class Update:
    """One update with everything that the host prepares for this process; see `prepare`."""

    data: ParallelDataset
    rows: Numbers
    """Lines of the training text, from 0; of all processes, as are the counts below."""
    micro_batches: list[MicroBatch]
    """The shard of this process."""
    tgt_tokens: int
    tokens: int
    flops: float
    padding: float
    """The share of padding in the padded tokens."""


def prepare(trainer: Trainer, data: ParallelDataset, pairs: Numbers) -> Update:
    """Split and pad the update of these pairs; deterministic, so that any thread may do it."""
    world, parts = trainer.world, micro_batches(trainer, data, pairs)
    src_lengths, tgt_lengths = data.src.lengths[pairs], data.tgt.lengths[pairs]
    tgt_tokens = int(tgt_lengths.sum())
    vocabulary = trainer.model.embedding.num_embeddings
    return Update(
        data,
        data.rows[pairs],
        [
            MicroBatch(number, part, data.rows[part], collate(*data.take(part)).pinned(world.device))
            for number, part in shard(parts, world.rank, world.size)
        ],
        tgt_tokens,
        tgt_tokens + int(src_lengths.sum()),
        float(training_flops(trainer.config.model, vocabulary, src_lengths, tgt_lengths).sum()),
        padding_share(parts, data.src.lengths, data.tgt.lengths),
    )


def train_step(trainer: Trainer, update: Update, step: int) -> StepStats:
    """Update the weights: the loss is summed over micro-batches and divided by the target tokens of the whole update.

    The host never waits for the device.
    """
    world, config, started = trainer.world, trainer.config, time.perf_counter()
    mine = update.micro_batches
    seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
    total, nll = (torch.zeros((), dtype=torch.float64, device=world.device) for _ in range(2))
    trainer.zero_grad()
    for turn, part in enumerate(mine):
        batch = part.batch.to(world.device)
        started = _lap(seconds, "data", started)
        # Dropout is seeded by step and micro-batch, so resuming needs no generator state, and another number of
        # processes draws the same masks if the update is split the same way.
        seed(world.device, derive_seed(config.train.seed, step, part.number + 1))
        # Gradients are exchanged once, in the backward pass of the last micro-batch.
        last = turn == len(mine) - 1
        with contextlib.nullcontext() if last else trainer.no_sync(), oom_context(trainer, update.data, part.pairs):
            trainer.at(f"forward pass of micro-batch {turn + 1} of {len(mine)}", part.rows, step)
            with trainer.precision():
                loss, part_nll = trainer.parallel(batch.src, batch.tgt_in, batch.tgt_out, batch.real)
            started = _lap(seconds, "forward", started)
            trainer.at(f"backward pass of micro-batch {turn + 1} of {len(mine)}", part.rows, step)
            # DDP averages over processes; this makes it the sum over all, per token of the update.
            weight = world.size / update.tgt_tokens if part.number >= 0 else 0.0
            trainer.scaler.scale(loss * weight).backward()
        started = _lap(seconds, "backward", started)
        if part.number >= 0:
            total += loss.detach()
            nll += part_nll
    rate = learning_rate(step, config.optim, config.train.max_steps, config.model.d_model)
    set_learning_rate(trainer.optimizer, rate)
    grad_norm, skipped = update_weights(trainer)
    _lap(seconds, "optimizer", started)
    of_all = (update.tgt_tokens, update.tokens, update.flops, update.padding)
    return StepStats(total, nll, grad_norm, skipped, rate, *of_all, seconds)


def update_weights(trainer: Trainer) -> tuple[Tensor, Tensor]:
    """Clip the gradient and step the optimizer unless the gradient is not finite; return its norm, and 1 if skipped.

    Every process has the same summed gradient, so all skip the same steps.
    """
    trainer.scaler.unscale_(trainer.optimizer)
    clip = trainer.config.optim.clip_norm or float("inf")
    grad_norm = nn.utils.clip_grad_norm_(trainer.model.parameters(), clip)
    skipped = (~torch.isfinite(grad_norm)).float()
    # Where this is 1 a fused Adam changes neither weights, moments nor step counts, without a synchronisation.
    trainer.optimizer.found_inf = skipped  # type: ignore[attr-defined]
    trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()
    return grad_norm, skipped


# ── errors and seeds ──────────────────────────────────────────────────────────────────────────────────────────────────


class OutOfMemory(NmtError):
    """A micro-batch does not fit; the message has its size and the setting to lower."""


@contextlib.contextmanager
def oom_context(trainer: Trainer, data: ParallelDataset, pairs: Numbers) -> Iterator[None]:
    """Turn a failed allocation into OutOfMemory with the size of the micro-batch."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        wanted = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        if not wanted:
            raise
        src, tgt = data.src.lengths[pairs], data.tgt.lengths[pairs]
        longest = int(np.argmax(src + tgt))
        finds = "; `auto` finds the largest that fits" if trainer.world.device.type == "cuda" else ""
        raise OutOfMemory(
            f"process {trainer.world.rank} of {trainer.world.size} is out of memory on {trainer.world.device}, with "
            f"a micro-batch of {counted(len(pairs), 'pair')}, "
            f"{len(pairs) * int(max(src.max(), tgt.max())):,} padded tokens a side. "
            f"Its longest pair has {src[longest]:,} + {tgt[longest]:,} tokens (line "
            f"{int(data.rows[pairs[longest]]) + 1:,} of the clean training text).\n"
            f"Lower runtime.device_tokens (now {trainer.device_tokens:,}{finds}), or "
            f"encode.max_tokens if the pair is alone in its micro-batch."
        ) from error


def seed(device: torch.device, number: int) -> None:
    """Seed the generator of a device."""
    if device.type == "cpu":
        # torch.manual_seed also queues the seed for GPUs, with a stack trace, which takes a millisecond.
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def derive_seed(*numbers: int) -> int:
    """Return a 64-bit seed that depends on all of these non-negative numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


def _lap(seconds: dict[str, float], name: str, since: float) -> float:
    now = time.perf_counter()
    seconds[name] += now - since
    return now


@torch.no_grad()
def dev_loss(trainer: Trainer, data: ParallelDataset) -> tuple[float, float]:
    """Return label-smoothed loss and nll of a data set in nats per target token; each process computes a shard."""
    trainer.model.eval()
    lengths = data.src.lengths, data.tgt.lengths
    parts = fill(length_order(*lengths), *lengths, trainer.device_tokens)
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.world.device)
    loss_of = TrainingModel(trainer.model, trainer.config.train.label_smoothing)
    for number, pairs in shard(parts, trainer.world.rank, trainer.world.size):
        if number >= 0:
            batch = collate(*data.take(pairs)).to(trainer.world.device)
            with trainer.precision():
                loss, nll = loss_of(batch.src, batch.tgt_in, batch.tgt_out, batch.real)
            sums += torch.stack((loss, nll))  # No item(): that would synchronise in each batch.
    trainer.model.train()
    tokens = int(data.tgt.lengths.sum())
    return tuple(value / tokens for value in trainer.world.sum(sums.tolist()))  # type: ignore[return-value]
