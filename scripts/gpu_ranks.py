"""The part of check_gpu.py that trains in two processes on one GPU, which exchange gradients by gloo.

NCCL refuses two processes on one GPU; gloo takes the tensors to the CPU and back, so this says nothing of speed. What
it shows is that the parallel and compiled model works on CUDA tensors: as one process would compute, equal on both.
"""

import json
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path

from torch import distributed, multiprocessing

from gpu_report import Report, Setting, recipe, synthetic, updates_of
from nmt.distributed.world import World, choose_device
from nmt.runs import checkpoint
from nmt.training.memory import probe_memory
from nmt.training.step import Trainer, prepare, train_step

STEPS = 6


def ranks(report: Report, at: Setting) -> None:
    """Two processes, plain and compiled, against one that is plain."""
    expected = losses_of(at.world, at.tiny, compiled=False)[0]
    for compiled in (False, True):
        name = "two processes, compiled" if compiled else "two processes"
        with report.attempt(name), tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            found = together(at, Path(folder), compiled)
            report.add(f"{name}: {STEPS} steps, start and compiling included", time.perf_counter() - begun, "s")
            furthest = max(abs(a - b) / b for losses, _ in found for a, b in zip(losses, expected, strict=True))
            report.at_most(f"{name}: losses, relative difference to one process", furthest, 1e-4)
            report.add(f"{name}: the same weights on both", "", ok=found[0][1] == found[1][1])


def together(at: Setting, folder: Path, compiled: bool) -> list[tuple[list[float], str]]:
    """What both processes found, within the time that is left."""
    context = multiprocessing.spawn(
        one_of_two, (str(at.device), at.tiny, compiled, folder), nprocs=2, join=False, daemon=True
    )
    until = time.monotonic() + max(5.0, at.left)
    try:
        while not context.join(timeout=1):
            if time.monotonic() > until:
                raise TimeoutError("the two processes took all the time that was left")
    finally:
        for process in context.processes:
            with suppress(Exception):
                process.kill()
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def one_of_two(rank: int, device: str, tiny: bool, compiled: bool, folder: Path) -> None:
    """What one of the two processes does; its losses and a hash of its weights go into the folder."""
    meet = f"file://{folder / 'meet'}"
    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        found = losses_of(World(rank, 2, choose_device(device)), tiny, compiled=compiled)
        (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        distributed.destroy_process_group()


def losses_of(world: World, tiny: bool, *, compiled: bool) -> tuple[list[float], str]:
    """The loss of each of a few steps for each target token, and a hash of the weights that they lead to."""
    vocab, size = (300, 240) if tiny else (8000, 6000)
    sizes = (
        f"train.batch_tokens={size}",
        f"runtime.device_tokens={size // 3}",
        f"runtime.compile={str(compiled).lower()}",
    )
    # Float32 and no dropout: another number of processes and another compiler only round otherwise.
    # And two layers: the more there are, the longer they compile.
    exact = ("model.dropout=0", "train.precision=float32", "optim.warmup_steps=4", "optim.lr_factor=0.2")
    exact = (*exact, "model.layers=2")
    config = recipe("base.yaml", *sizes, *exact, tiny=tiny)
    data = synthetic(size // 4, vocab, mean=8 if tiny else 25)
    trainer = probe_memory(Trainer.build(config, world, (vocab, vocab)), data)
    losses = []
    for step, update in enumerate(islice(cycle(updates_of(data, config)), STEPS), 1):
        stats = train_step(trainer, prepare(trainer, data, update), step)
        losses.append(world.sum([float(stats.loss)])[0] / stats.tgt_tokens)
    return losses, checkpoint.digest(trainer.model.state_dict())
