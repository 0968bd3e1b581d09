"""Processes that train together: World is handed along as a value, and a world of one is the same object."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed, nn

from nmt.errors import ConfigError, NmtError

TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others: one validates while the rest wait."""


@dataclass(frozen=True)
class World:
    """Which of how many processes this one is, and the device that it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, equal on all."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def from_leader(self, values: Sequence[float]) -> list[float]:
        """The leader's values, equal on all; the others' are not looked at."""
        return self.sum(values if self.leads else [0.0] * len(values))

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            self.sum([0.0])


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device called `name`; `auto` is a GPU if there is one. Raises ConfigError if it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: no such device; give auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no GPU here; give cpu, or install a CUDA build of torch.")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ConfigError(f"--device: there is no GPU {device.index}; torch sees {torch.cuda.device_count()}.")
        torch.cuda.set_device(device)
    elif device.type != "cpu" and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise ConfigError(f"--device {name}: this machine has none; give auto, cpu, cuda or cuda:N.")
    return device


def is_launched() -> bool:
    """Whether torchrun, or something with its manners, started this process."""
    return "WORLD_SIZE" in os.environ


@contextmanager
def join(device: str = "auto") -> Iterator[World]:
    """The world of this process: what torchrun's environment says, or one process alone."""
    if not is_launched():
        yield World(0, 1, choose_device(device))
        return
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the launcher's environment is not whole ({error}); start with torchrun.") from error
    chosen = choose_device(device, local_rank)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    try:
        distributed.init_process_group(backend, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise NmtError(f"process {rank} of {size} could not join the others: {error}") from error
    try:
        yield World(rank, size, chosen)
    finally:
        distributed.destroy_process_group()


def parallelize(model: nn.Module, world: World) -> nn.Module:
    """The model as one whose gradients are the mean over all processes after each backward pass."""
    if world.size == 1:
        return model
    devices = [world.device] if world.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def launch(arguments: Sequence[str], processes: int) -> int:
    """Start `python -m nmt ARGUMENTS` in so many processes on this machine; returns the exit code of torchrun.

    On a CPU each gets its share of the cores as threads.
    """
    environment = dict(os.environ)
    if "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run([*command, "-m", "nmt", *arguments], env=environment, check=False).returncode
