"""One update of the weights, and the loss of the dev set: the arithmetic of training, without files.

Shapes: B sentences, S source tokens, T target tokens, D model width, V vocabulary, N real target tokens.
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
        """This process now does that, with these lines of the training text."""


@dataclass(frozen=True)
class StepStats:
    """What one update measured on this process; tensors, so that no step waits for the device."""

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
    """The model with its loss as one forward pass, which is what processes synchronise."""

    def __init__(self, model: Transformer, smoothing: float) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, src_BS: Tensor, tgt_BT: Tensor, tgt_out_BT: Tensor, real_N: Tensor) -> tuple[Tensor, Tensor]:
        """Label-smoothed loss and nll in nats, summed over the real target tokens; see Batch."""
        hidden_ND = self.model(src_BS, tgt_BT).flatten(0, 1).index_select(0, real_N)
        target_N = tgt_out_BT.flatten().index_select(0, real_N)
        return label_smoothed_loss(hidden_ND, self.model.embedding.weight, target_N, self.smoothing)


@dataclass(frozen=True)
class Trainer:
    """The parts of a training that stay the same from step to step."""

    config: Config
    """Of its `auto` settings none is left, but `runtime.device_tokens` on a GPU."""
    world: World
    model: Transformer
    parallel: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    """Keeps gradients in the range of float16; does nothing in other precisions."""
    device_tokens: int
    """`runtime.device_tokens`, or what `auto` has found."""
    at: NoHeartbeat
    """Is told where the training is."""

    @staticmethod
    def build(config: Config, world: World, vocab_sizes: tuple[int, int], at: NoHeartbeat | None = None) -> "Trainer":
        """A new model, equal on all processes."""
        gpu = gpu_of(world.device)
        config = gpu_defaults.for_training(config, gpu)
        torch.manual_seed(config.train.seed)
        model = Transformer(config.model, vocab_sizes[1], None if config.bpe.shared_vocab else vocab_sizes[0])
        model.to(world.device)
        limit_onednn_cache(world.device, config.train.precision, 64)
        training_model = TrainingModel(model, config.train.label_smoothing)
        optimizer = build_optimizer(model, config.optim)
        if config.runtime.compile:
            # Each layer by itself: the backward pass of a model compiled whole hands over all gradients at its end, and
            # DDP could not exchange those of the last layers while the first are computed. Not the loss: its loop over
            # chunks would be unrolled, and compiled again for each number of chunks.
            for layer in (*model.encoder, *model.decoder_layers):
                layer.compile(dynamic=True)
        scaler = torch.amp.GradScaler(world.device.type, enabled=config.train.precision == "float16")
        limit = gpu_defaults.device_tokens(config.runtime.device_tokens, config.train.batch_tokens, world.size, gpu)
        return Trainer(
            config, world, model, wrap_ddp(training_model, world), optimizer, scaler, limit, at or NoHeartbeat()
        )

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self.config.train.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, dtype=PRECISIONS[self.config.train.precision])

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a backward pass whose gradients are not exchanged yet."""
        return self.parallel.no_sync() if self.world.size > 1 else contextlib.nullcontext()  # type: ignore[operator]

    def zero_grad(self) -> None:
        """Begin a new sum of gradients.

        DDP's stay where they are, in its buckets: the gradients of micro-batches that are not exchanged yet would else
        be a second set beside these.
        """
        self.optimizer.zero_grad(set_to_none=self.world.size == 1)


def micro_batches(trainer: Trainer, data: ParallelDataset, update: Numbers) -> list[Numbers]:
    """How an update is cut for the processes and devices at hand; see nmt.data.batching."""
    overhead = OVERHEAD.get(trainer.world.device.type, OVERHEAD["cpu"])
    return split_micro_batches(
        update, data.src.lengths, data.tgt.lengths, trainer.device_tokens, trainer.world.size, overhead
    )


@dataclass(frozen=True)
class MicroBatch:
    """Pairs that one forward pass computes."""

    number: int
    """In the update, from 0; -1 for one that is another process's, and counts for nothing here."""
    pairs: Numbers
    rows: Numbers
    """The lines of the training text that they came from, from 0."""
    batch: Batch


@dataclass(frozen=True)
class Update:
    """One update as this process computes it, with all that the host works out for it; see `prepare`."""

    data: ParallelDataset
    rows: Numbers
    """The lines of the training text that its pairs came from, from 0; of all processes, as are the numbers below."""
    micro_batches: list[MicroBatch]
    """Those that this process computes."""
    tgt_tokens: int
    tokens: int
    flops: float
    padding: float
    """The share of token slots that hold padding."""


def prepare(trainer: Trainer, data: ParallelDataset, pairs: Numbers) -> Update:
    """The update that holds these pairs of `data`, cut and padded; the same numbers whichever thread works them out."""
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
    """One update of the weights: the loss summed over its micro-batches, divided by all of its target tokens.

    The host waits for nothing that the device computes.
    """
    world, config, started = trainer.world, trainer.config, time.perf_counter()
    mine = update.micro_batches
    seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
    total, nll = (torch.zeros((), dtype=torch.float64, device=world.device) for _ in range(2))
    trainer.zero_grad()
    for turn, part in enumerate(mine):
        batch = part.batch.to(world.device)
        started = _lap(seconds, "data", started)
        # Dropout's randomness is a function of what is computed, so going on needs no generator's state, and another
        # number of processes draws the same masks where the update is cut the same.
        seed(world.device, derive_seed(config.train.seed, step, part.number + 1))
        # Gradients are exchanged once, in the backward pass of the last micro-batch.
        last = turn == len(mine) - 1
        with contextlib.nullcontext() if last else trainer.no_sync(), oom_context(trainer, update.data, part.pairs):
            trainer.at(f"forward pass of micro-batch {turn + 1} of {len(mine)}", part.rows, step)
            with trainer.precision():
                loss, part_nll = trainer.parallel(batch.src, batch.tgt_in, batch.tgt_out, batch.real)
            started = _lap(seconds, "forward", started)
            trainer.at(f"backward pass of micro-batch {turn + 1} of {len(mine)}", part.rows, step)
            # DDP takes the mean over processes; what is wanted is the sum over all, for each token of the update.
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
    """Clip the gradient and take the optimizer's step, unless the gradient is not finite; its norm, and 1 or 0.

    Every process holds the same summed gradient, so all leave out the same steps.
    """
    trainer.scaler.unscale_(trainer.optimizer)
    clip = trainer.config.optim.clip_norm or float("inf")
    grad_norm = nn.utils.clip_grad_norm_(trainer.model.parameters(), clip)
    skipped = (~torch.isfinite(grad_norm)).float()
    # A fused Adam leaves weights, moments and step counts alone where this is 1, and nobody waits to be told.
    trainer.optimizer.found_inf = skipped  # type: ignore[attr-defined]
    trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()
    return grad_norm, skipped


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class OutOfMemory(NmtError):
    """A micro-batch does not fit; the message says how large it is and what to lower."""


@contextlib.contextmanager
def oom_context(trainer: Trainer, data: ParallelDataset, pairs: Numbers) -> Iterator[None]:
    """Turn a failed allocation into OutOfMemory, with what was computed."""
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
            f"{len(pairs) * int(max(src.max(), tgt.max())):,} token slots a side. "
            f"Its longest pair has {src[longest]:,} + {tgt[longest]:,} tokens (line "
            f"{int(data.rows[pairs[longest]]) + 1:,} of the clean training text).\n"
            f"Lower runtime.device_tokens (now {trainer.device_tokens:,}{finds}), or "
            f"encode.max_tokens if the pair is alone in its micro-batch."
        ) from error


def seed(device: torch.device, number: int) -> None:
    """Begin the random numbers of a device anew."""
    if device.type == "cpu":
        # torch's function notes this for GPUs that may still be asked for, with the stack, which takes a millisecond.
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def derive_seed(*numbers: int) -> int:
    """A 64-bit seed that depends on every one of these numbers from 0."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


def _lap(seconds: dict[str, float], name: str, since: float) -> float:
    now = time.perf_counter()
    seconds[name] += now - since
    return now


@torch.no_grad()
def dev_loss(trainer: Trainer, data: ParallelDataset) -> tuple[float, float]:
    """Label-smoothed loss and nll of a data set, in nats for each target token; every process does a share."""
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
            sums += torch.stack((loss, nll))  # Not their items: the device would be waited for in each batch.
    trainer.model.train()
    tokens = int(data.tgt.lengths.sum())
    return tuple(value / tokens for value in trainer.world.sum(sums.tolist()))  # type: ignore[return-value]
