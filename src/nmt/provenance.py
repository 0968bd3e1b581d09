"""What a run folder says of itself: its settings, what it was made from, its state, and who is in it now."""

import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nmt.config import Config, differences, from_dict, to_dict
from nmt.errors import CheckpointError, ConfigError
from nmt.text import read_object, write_json

log = logging.getLogger(__name__)

BY_HAND = ("average", "final-before")
"""Folders that `nmt average` leaves in a run."""

PACKAGES = ("torch", "numpy", "sentencepiece", "sacrebleu", "safetensors", "opencc")


@dataclass(frozen=True)
class TrainPaths:
    """The folders that a training reads, and the run folder that it writes."""

    clean: Path
    bpe: Path
    encode: Path
    run: Path


def tokenizer_files(folder: Path) -> list[Path]:
    """The SentencePiece models and their readable vocabularies in a folder."""
    return sorted([*folder.glob("*.model"), *folder.glob("*.vocab")])


def identity(config: Config, paths: TrainPaths) -> dict[str, Any]:
    """What decides the result of a training: its settings, but for how many steps it may take, and its data."""

    def sha256(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    settings = to_dict(config)
    optim = {key: value for key, value in settings["optim"].items() if key != "max_steps"}
    if config.optim.schedule == "cosine":
        optim["max_steps"] = config.optim.max_steps  # The course of the learning rate depends on it.
    return {
        "data": {"src": config.data.src, "tgt": config.data.tgt},
        "bpe": {"dropout": config.bpe.dropout},
        "model": settings["model"],
        "optim": optim,
        "content": {
            "encoded data": sha256(paths.encode / "meta.json"),
            "tokenizer": {path.name: sha256(path) for path in tokenizer_files(paths.bpe) if path.suffix == ".model"},
        },
    }


def unchanged(config: Config, paths: TrainPaths) -> bool:
    """Whether the run folder is one of these settings and this data."""
    try:
        return not differences(_identity_of(paths.run), identity(config, paths))
    except CheckpointError:
        return False


def _identity_of(run: Path) -> dict[str, Any]:
    """What a run folder says it was trained with; raises CheckpointError if that cannot be read."""
    try:
        return read_object(run / "identity.json")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; start over with --fresh, or give a --name.") from error


def open_run(config: Config, paths: TrainPaths, *, fresh: bool) -> None:
    """Make the run folder whole in itself, or check that it is a run of the same settings and data.

    Raises ConfigError with old -> new if it is another's; `fresh` removes what is there.
    """
    run, now = paths.run, identity(config, paths)
    try:
        if fresh:
            for name in ("checkpoints", "best", "final", "tensorboard", "translate", "eval", "heartbeat", *BY_HAND):
                shutil.rmtree(run / name, ignore_errors=True)
            for name in ("metrics.jsonl", "identity.json", "status.json", "stamp.json"):
                (run / name).unlink(missing_ok=True)
        if (run / "identity.json").exists():
            changed = differences(_identity_of(run), now)
            if changed:
                raise ConfigError(
                    f"{run} was trained with other settings or data:",
                    *(f"  {line}" for line in changed),
                    "Go on with the old ones, start over with nmt train --fresh, or give the run a --name of its own.",
                )
        if (run / "config.json").exists():
            before, after = (to_dict(some)["train"] for some in (read_config(run), config))
            for line in differences({"train": before}, {"train": after}):
                log.info("train: going on with another setting: %s", line)
        (run / "tokenizer").mkdir(parents=True, exist_ok=True)
        for path in tokenizer_files(paths.bpe):
            shutil.copyfile(path, run / "tokenizer" / path.name)
        shutil.copyfile(paths.clean / "normalisation.json", run / "normalisation.json")
        write_json(run / "config.json", to_dict(config))
        earlier = [] if fresh else _sessions(run)
        write_json(run / "provenance.json", provenance(paths) | {"earlier": earlier})
        write_json(run / "identity.json", now)
    except OSError as error:
        raise ConfigError(f"cannot write the run folder {run}: {error.strerror} ({error.filename}).") from error


def provenance(paths: TrainPaths) -> dict[str, Any]:
    """Where, when and with what a training was started."""
    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("nmt", *PACKAGES)},
        **source_code(),
        "clean": str(paths.clean),
        "bpe": str(paths.bpe),
        "encode": str(paths.encode),
    }


def source_code() -> dict[str, Any]:
    """The commit of this code, and whether its files differ from it (`dirty`); None where it is in no clone of its own.

    A package that is installed may lie in somebody's repository, whose commits say nothing about it.
    """
    package = Path(__file__).resolve().parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=False)
        except OSError:  # There is no git.
            return None
        return None if done.returncode else done.stdout.removesuffix("\n")

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "nmt" != package:
        return {"commit": None, "dirty": None}
    changes = git("status", "--porcelain", "--", str(package))
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def _sessions(run: Path) -> list[Any]:
    """What is known of the processes that have trained a run so far, the first one first."""
    try:
        last = read_object(run / "provenance.json")
    except CheckpointError:  # There were none, or nothing is known.
        return []
    earlier = last.pop("earlier", [])
    return [*(earlier if isinstance(earlier, list) else []), last]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # nmt itself, where it is used without being installed.
        return None


def read_config(run: Path) -> Config:
    """The settings that a run was trained with; raises CheckpointError if the folder is no run."""
    try:
        return from_dict(json.loads((run / "config.json").read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{run} is no run folder: its config.json cannot be read ({error}).") from error


@contextmanager
def lock(run: Path) -> Iterator[None]:
    """Keep a second training out of the run folder while the block runs; the kernel frees it if the process dies."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        stream = open(run / "lock", "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"cannot write the run folder {run}: {error.strerror}.") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.seek(0)
            raise ConfigError(
                f"another training is in {run} ({stream.read().strip() or 'unknown'}); wait for it, or give a --name."
            ) from error
        stream.truncate(0)
        stream.write(f"pid {os.getpid()} on {socket.gethostname()}")
        stream.flush()
        yield


def leads() -> bool:
    """Whether this process is the one that writes, by the environment of whoever started it."""
    return os.environ.get("RANK", "0") == "0"
