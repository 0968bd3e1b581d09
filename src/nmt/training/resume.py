"""Start or resume a training: all processes from one checkpoint with equal weights, settings and data, or none."""

import contextlib
import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from nmt.config import Config, Precision, to_dict
from nmt.distributed import gpu_defaults
from nmt.distributed.world import World, gpu_of
from nmt.errors import CheckpointError
from nmt.runs import checkpoint
from nmt.runs.identity import TrainPaths, identity, trained_precision
from nmt.runs.run_dir import RunDir
from nmt.training.step import Trainer
from nmt.training.validation import Progress

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")

log = logging.getLogger(__name__)

NFS_DELAY = 60.0
"""Seconds until a file written by one machine is visible on another: the age of NFS's directory cache."""


def settle(config: Config, run: Path, world: World, *, fresh: bool) -> Config:
    """Return the settings with `auto` resolved, equal on all processes.

    The precision is part of the identity of a run, so a resumed run keeps it on any device; a new run takes that of
    rank 0's device.
    """
    found = gpu_defaults.for_training(config, gpu_of(world.device))
    chosen = found.train.precision
    with world.all_or_none():
        if world.is_main and config.train.precision == "auto" and not fresh:
            before = trained_precision(run)
            if before in PRECISIONS and before != chosen:
                log.info(f"train: train.precision stays {before}, as the run was started with; auto is {chosen} here")
                chosen = before
    chosen = PRECISIONS[int(world.broadcast([PRECISIONS.index(chosen)])[0])]
    return replace(found, train=replace(found.train, precision=chosen))


def resume(trainer: Trainer, run: RunDir, init_from: Path | None) -> Progress:
    """Load the checkpoint that rank 0 chooses, or the initial weights, on all processes or on none.

    Rank 0 takes the newest intact checkpoint that fits. If another process cannot read that one, all fail: an older one
    would do, but a machine that reads one file wrongly is not to be trusted with the rest.
    """
    world, newest = trainer.world, None
    with world.all_or_none():
        if world.is_main:
            newest = checkpoint.load_newest(run, trainer.model, trainer.optimizer, Progress)
            choice = f"{newest[0].name} {checkpoint.manifest_hash(newest[0])}" if newest else ""
    name, _, manifest = world.gather(choice.encode() if world.is_main else b"")[0].decode().partition(" ")
    folder, progress = run.checkpoints / name, newest[1] if newest else Progress()
    with world.all_or_none():
        if name and not world.is_main:
            progress = load_same(trainer, folder, manifest)
        elif not name and init_from is not None:
            load_initial(trainer, run, init_from)
    if name:
        if trainer.scaler.is_enabled():
            ours = {"scale": progress.loss_scale, "_growth_tracker": progress.scale_steps}
            trainer.scaler.load_state_dict(trainer.scaler.state_dict() | ours)
        if world.is_main:
            log.info("train: resuming from %s", folder)
    return progress


def load_same(trainer: Trainer, folder: Path, manifest: str) -> Progress:
    """Load the checkpoint that process 0 has loaded, if it is the same here."""
    try:
        if checkpoint.manifest_hash(folder) != manifest:
            raise CheckpointError(f"{folder} is not the checkpoint of that name that process 0 has read")
        return checkpoint.load_training(folder, trainer.model, trainer.optimizer, Progress)
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot resume from the checkpoint of process 0: {error}; the run folder must be on a disk that all "
            "processes see, and each must read from it what was written."
        ) from error


def load_initial(trainer: Trainer, run: RunDir, init_from: Path) -> None:
    """Begin with the final weights of another run."""
    weights, _ = checkpoint.load(RunDir(init_from).final)
    try:
        trainer.model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {init_from} do not fit this model and vocabulary: {error}") from error
    for path in sorted(run.tokenizer.glob("*.model")):
        if (RunDir(init_from).tokenizer / path.name).read_bytes() != path.read_bytes():
            raise CheckpointError(
                f"{init_from} has another vocabulary; set bpe.model to [{RunDir(init_from).tokenizer / path.name}]."
            )


# ── what the processes must have in common ────────────────────────────────────────────────────────────────────────────


def require_shared(run: RunDir, world: World, timeout: float) -> None:
    """Raise on all processes unless each sees the run folder that process 0 has just written to."""
    path = run.provenance_file
    written = world.gather(path.read_bytes() if world.is_main else b"")[0]

    def seen() -> bool:
        with contextlib.suppress(OSError):
            os.listdir(run.parent)  # Has NFS ask again what is there.
            return path.read_bytes() == written
        return False

    with world.all_or_none():
        until = time.monotonic() + min(NFS_DELAY, timeout / 2)  # The others do not wait for longer.
        while not seen():
            if time.monotonic() > until:
                raise CheckpointError(
                    f"cannot read {path} as process 0 has written it; the run folder must be on a disk that all "
                    "processes see."
                )
            time.sleep(0.1)


def require_equal_settings(config: Config, paths: TrainPaths, world: World) -> None:
    """Raise on all processes unless they were started with the same settings and data."""
    settings = {name: values for name, values in to_dict(config).items() if name not in ("clean", "bpe", "eval")}
    with world.all_or_none():
        facts = {"the hash of the settings": settings, "the hash of settings and data": identity(config, paths)}
    hashes = {name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12] for name, value in facts.items()}
    world.require_equal(hashes, "Start all processes with the same command, and let them see the same data.")


def require_equal_state(trainer: Trainer, progress: Progress) -> None:
    """Raise on all processes unless they are at the same step with the same weights and optimizer, bit for bit."""
    if trainer.world.size > 1:
        moments = checkpoint.optimizer_tensors(trainer.optimizer, trainer.model)
        facts = {name: str(value) for name, value in asdict(progress).items()} | {
            "the hash of the weights": checkpoint.digest(trainer.model.state_dict())[:12],
            "the hash of the optimizer's state": checkpoint.digest(moments)[:12],
        }
        trainer.world.require_equal(
            facts, "Processes must begin alike, so no step was taken. The same command tries again from the checkpoint."
        )
