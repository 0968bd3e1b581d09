"""One update of the weights, and the loss of the dev set: the arithmetic of training, without files."""

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nmt.batching import Numbers, collate, cut, padding_share, share
from nmt.config import Config
from nmt.dataset import ParallelDataset
from nmt.distributed import World, parallelize
from nmt.loss import label_smoothed_loss
from nmt.model import Transformer
from nmt.optimizer import build_optimizer, learning_rate, set_learning_rate
from nmt.sizes import training_flops


@dataclass(frozen=True)
class StepStats:
    """What one update measured on this process; tensors, so that no step waits for the device."""

    loss: Tensor
    nll: Tensor
    grad_norm: Tensor
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
    world: World
    model: Transformer
    parallel: nn.Module
    optimizer: torch.optim.Optimizer

    @staticmethod
    def build(config: Config, world: World, vocab_sizes: tuple[int, int]) -> "Trainer":
        """A new model, equal on all processes."""
        torch.manual_seed(config.optim.seed)
        model = Transformer(config.model, vocab_sizes[1], None if config.bpe.joint else vocab_sizes[0])
        model.to(world.device)
        training_model = TrainingModel(model, config.optim.label_smoothing)
        optimizer = build_optimizer(model, config.optim)
        if config.train.compile:
            # Not the loss: its loop over chunks would be unrolled, and compiled again for each number of chunks.
            model.compile(dynamic=True)
        return Trainer(config, world, model, parallelize(training_model, world), optimizer)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self.config.optim.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16)


def micro_batches(trainer: Trainer, data: ParallelDataset, update: Numbers) -> list[Numbers]:
    """How an update is cut for the processes and devices at hand; see nmt.batching."""
    limit = trainer.config.train.device_tokens
    return cut(update, data.src.lengths, data.tgt.lengths, limit, trainer.world.size)


def train_step(trainer: Trainer, data: ParallelDataset, update: Numbers, step: int) -> StepStats:
    """One update of the weights: the loss summed over its micro-batches, divided by all of its target tokens."""
    world, optim, started = trainer.world, trainer.config.optim, time.perf_counter()
    parts = micro_batches(trainer, data, update)
    tgt_lengths = data.tgt.lengths
    tgt_tokens = int(tgt_lengths[update].sum())
    mine = share(parts, world.rank, world.size)
    seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
    total, nll = (torch.zeros((), dtype=torch.float64, device=world.device) for _ in range(2))
    trainer.optimizer.zero_grad()
    for turn, (number, pairs) in enumerate(mine):
        batch = collate(*data.take(pairs)).to(world.device)
        started = _lap(seconds, "data", started)
        # Dropout's randomness is a function of what is computed, so going on needs no generator's state, and another
        # number of processes draws the same masks where the update is cut the same.
        torch.manual_seed(mix(optim.seed, step, number + 1))
        # Gradients are exchanged once, in the backward pass of the last micro-batch.
        wait = turn < len(mine) - 1 and world.size > 1
        with trainer.parallel.no_sync() if wait else contextlib.nullcontext():  # type: ignore[operator]
            with trainer.precision():
                loss, part_nll = trainer.parallel(batch.src, batch.tgt_in, batch.tgt_out, batch.real)
            started = _lap(seconds, "forward", started)
            # DDP takes the mean over processes; what is wanted is the sum over all, for each token of the update.
            weight = world.size / tgt_tokens if number >= 0 else 0.0
            (loss * weight).backward()
        started = _lap(seconds, "backward", started)
        if number >= 0:
            total += loss.detach()
            nll += part_nll
    grad_norm = nn.utils.clip_grad_norm_(trainer.model.parameters(), optim.clip_norm or float("inf"))
    rate = learning_rate(step, optim, trainer.config.model.d_model)
    set_learning_rate(trainer.optimizer, rate)
    trainer.optimizer.step()
    _lap(seconds, "optimizer", started)
    src_lengths = data.src.lengths[update]
    tokens = tgt_tokens + int(src_lengths.sum())
    vocabulary = trainer.model.embedding.num_embeddings
    flops = float(training_flops(trainer.config.model, vocabulary, src_lengths, tgt_lengths[update]).sum())
    padding = padding_share(parts, data.src.lengths, tgt_lengths)
    return StepStats(total, nll, grad_norm, rate, tgt_tokens, tokens, flops, padding, seconds)


def mix(*numbers: int) -> int:
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
    everything = np.arange(len(data))
    sums = [0.0, 0.0]
    loss_of = TrainingModel(trainer.model, trainer.config.optim.label_smoothing)
    for number, pairs in share(micro_batches(trainer, data, everything), trainer.world.rank, trainer.world.size):
        if number >= 0:
            batch = collate(*data.take(pairs)).to(trainer.world.device)
            with trainer.precision():
                loss, nll = loss_of(batch.src, batch.tgt_in, batch.tgt_out, batch.real)
            sums = [sums[0] + loss.item(), sums[1] + nll.item()]
    trainer.model.train()
    tokens = int(data.tgt.lengths.sum())
    return tuple(value / tokens for value in trainer.world.sum(sums))  # type: ignore[return-value]
