"""What a run folder says of itself: its settings, what it was made from, its state, and who is in it now."""

import fcntl
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from nmt.config import Config, Precision, differences, from_dict, of_kind, to_dict
from nmt.errors import CheckpointError, ConfigError
from nmt.pipeline import read_json, what_changed
from nmt.text import read_object, sha256_of, write_json

log = logging.getLogger(__name__)

FORMAT = 4
"""Of identity.json; a run of another one is not resumed."""

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


def training_settings(config: Config) -> dict[str, Any]:
    """The settings that decide the result of a training; the fingerprint of the stage and the run's identity."""
    decides: dict[str, Any] = {
        "data": {"src": config.data.src, "tgt": config.data.tgt},
        "bpe": {"dropout": config.bpe.dropout},
        **{name: of_kind(getattr(config, name), "result") for name in ("model", "optim", "train")},
    }
    if config.bpe.dropout:  # Each epoch is then encoded anew, and what becomes too long keeps its plain pieces.
        decides["encode"] = of_kind(config.encode, "result")
    return decides


def training_reads(config: Config, paths: TrainPaths) -> dict[str, Path]:
    """The files that decide the result of a training, by names that are the same on every machine.

    `meta.json` stands for all encoded data: it has the SHA-256 of each file, which is checked when that is opened.
    """
    models = ["joint.model"] if config.bpe.shared_vocab else [f"{lang}.model" for lang in config.clean.columns]
    splits = ("dev", "train") if config.bpe.dropout else ("dev",)
    text = [f"{split}.{lang}" for split in splits for lang in config.clean.columns]
    return {
        "encode/meta.json": paths.encode / "meta.json",
        **{f"bpe/{name}": paths.bpe / name for name in models},
        **{f"clean/{name}": paths.clean / name for name in ("normalisation.json", *text)},
    }


def identity(config: Config, paths: TrainPaths, init_from: Path | None = None) -> dict[str, Any]:
    """What decides the result of a training: its settings, the content of what it reads, and the weights it began with.

    `init_from` is the run whose final weights a training begins with.
    """
    found = {
        "format": FORMAT,
        "settings": training_settings(config),
        "reads": {name: sha256_of(path) for name, path in training_reads(config, paths).items()},
    }
    if init_from is not None:
        manifest = init_from / "final" / "manifest.json"
        try:
            found["init_from"] = {"run": str(init_from), "manifest": sha256_of(manifest)}
        except OSError as error:
            raise CheckpointError(
                f"--init-from: {manifest} cannot be read ({error.strerror}); name the folder of a finished run."
            ) from error
    return found


def _conflicts(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What keeps a run with the identity `before` from being resumed as `now`, a line for each difference.

    More steps may be asked for, unless every learning rate depends on their number.
    """
    settings = before["settings"]
    if now["settings"]["optim"]["schedule"] != "cosine":
        settings = settings | {"train": settings["train"] | {"max_steps": now["settings"]["train"]["max_steps"]}}
    if now["settings"]["train"]["precision"] == "auto":  # What the run began with is what it means here.
        settings = settings | {"train": settings["train"] | {"precision": "auto"}}
    found = what_changed(before | {"settings": settings}, now)
    if "init_from" in now and before.get("init_from", {}).get("manifest") != now["init_from"]["manifest"]:
        found.append("it did not begin with the weights that --init-from names")
    return found


def unchanged(config: Config, paths: TrainPaths, init_from: Path | None = None) -> bool:
    """Whether the run folder is one of these settings and this data."""
    try:
        return not _conflicts(read_identity(paths.run), identity(config, paths, init_from))
    except (CheckpointError, OSError):
        return False


def read_identity(run: Path) -> dict[str, Any]:
    """What decided the result of a run; raises CheckpointError if that cannot be read."""
    path = run / "identity.json"
    try:
        found = read_object(path)
        if found.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {found.get('format')}, this nmt reads {FORMAT}")
        if not all(isinstance(found.get(key), dict) for key in ("settings", "reads")):
            raise CheckpointError(f"{path} lacks settings or reads")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; start over with nmt train --fresh, or give a --name.") from error
    return found


def trained_precision(run: Path) -> Precision | None:
    """The precision that a run began with, which `auto` means for the rest of it; None if it has not begun."""
    if not (run / "identity.json").exists():
        return None
    found: Precision = read_identity(run)["settings"].get("train", {}).get("precision", "auto")
    return found


def as_trained(config: Config, run: Path) -> Config:
    """The settings of a run with the precision that `auto` became when it began, if that is known."""
    before = trained_precision(run) if config.train.precision == "auto" else None
    return replace(config, train=replace(config.train, precision=before)) if before else config


def open_run(
    config: Config,
    paths: TrainPaths,
    numerics: dict[str, Any],
    *,
    fresh: bool,
    init_from: Path | None = None,
    given: Config | None = None,
) -> None:
    """Make the run folder complete in itself, or check that it is a run of the same settings and data.

    `config` has what `auto` means here; `given` are the settings as they were given, which others compare with.

    `numerics` is what changes rounding alone; another value of it than before is logged. Raises ConfigError with
    old -> new if the folder is another training's; `fresh` removes what is there.
    """
    from nmt.overlap import keep_keys  # Here, so that a status loads no numpy.

    run = paths.run
    try:
        now = identity(config, paths, init_from)
        if init_from is not None:
            _check_initial(config, run, init_from)
        if fresh:
            made = ("checkpoints", "best", "final", "tensorboard", "translate", "eval", "heartbeat", "train_keys")
            for name in (*made, *BY_HAND):
                shutil.rmtree(run / name, ignore_errors=True)
            for name in ("metrics.jsonl", "identity.json", "status.json", "stamp.json", "numerics.json"):
                (run / name).unlink(missing_ok=True)
        if (run / "identity.json").exists():
            before = read_identity(run)
            _check_resumable(run, _conflicts(before, now), config.train.max_steps)
            now = {**now, **{key: before[key] for key in ("init_from",) if key in before}}
            for line in differences(read_json(run / "numerics.json"), numerics):
                log.info("train: resuming with other numerics: %s", line)
        (run / "tokenizer").mkdir(parents=True, exist_ok=True)
        for path in tokenizer_files(run / "tokenizer"):
            if not (paths.bpe / path.name).exists():  # Of a training with another kind of vocabulary.
                path.unlink()
        for path in tokenizer_files(paths.bpe):
            shutil.copyfile(path, run / "tokenizer" / path.name)
        shutil.copyfile(paths.clean / "normalisation.json", run / "normalisation.json")
        keep_keys(paths.clean, config.clean.columns, run, init_from)
        write_json(run / "config.json", to_dict(given or config))
        earlier = [] if fresh else _sessions(run)
        write_json(run / "provenance.json", provenance(paths) | {"earlier": earlier})
        write_json(run / "numerics.json", numerics)
        write_json(run / "identity.json", now)
    except OSError as error:
        raise ConfigError(f"cannot write the run folder {run}: {error.strerror} ({error.filename}).") from error


def _check_initial(config: Config, run: Path, init_from: Path) -> None:
    """Raise ConfigError if the weights of `init_from` mean something else in this model, though they may fit it."""
    if init_from.resolve() == run.resolve():
        raise ConfigError(f"--init-from names {run} itself; give the new run a --name of its own.")
    earlier = read_config(init_from)
    found = differences(_model_of(earlier), _model_of(config))
    if not config.bpe.shared_vocab and earlier.data.src != config.data.src:
        found.append(f"data.src: {earlier.data.src} -> {config.data.src} (each language has its own vocabulary)")
    if found:
        raise ConfigError(f"--init-from: {init_from} has another model:", *(f"  {line}" for line in found))


def _model_of(config: Config) -> dict[str, Any]:
    """What the weights of a run belong to: the settings of its model without those of dropout, and its vocabularies."""
    model = {name: value for name, value in to_dict(config.model).items() if not name.endswith("dropout")}
    model |= {
        "decoder_layers": config.model.decoder_layers or config.model.layers,
        "kv_heads": config.model.kv_heads or config.model.heads,
    }
    if config.model.position != "learned":
        del model["max_positions"]
    return {"model": model, "bpe": {"shared_vocab": config.bpe.shared_vocab}}


def _check_resumable(run: Path, conflicts: list[str], max_steps: int) -> None:
    """Raise ConfigError if something decides that a training cannot go on in `run`."""
    taken = read_json(run / "status.json").get("step", 0)
    if not conflicts and isinstance(taken, int) and taken > max_steps:
        conflicts = [f"it has taken {taken:,} steps already, and train.max_steps is {max_steps:,}"]
    if conflicts:
        raise ConfigError(
            f"{run} was trained with other settings or data:",
            *(f"  {line}" for line in conflicts),
            "Resume it with the old ones, start over with nmt train --fresh, or give the new run a --name of its own.",
        )


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
    except ConfigError as error:
        more = f" And {len(error.problems) - 1} more" if len(error.problems) > 1 else ""
        raise CheckpointError(
            f"{run / 'config.json'} was written by another version of nmt ({error.problems[0]}{more}). Use that "
            "version, which provenance.json names, or train again with nmt train --fresh."
        ) from error


def check_as_trained(run: Path, config: Config, vocabularies: Mapping[str, str]) -> None:
    """Raise CheckpointError for what would give the weights, or the ids, another meaning than they had in training.

    `config` is what the run folder says of itself, `vocabularies` the files of its tokenizers with their SHA-256.
    """
    if not (run / "identity.json").exists():
        return  # A run that was put together by hand.
    trained = read_identity(run)
    before, reads = {name: trained["settings"].get(name, {}) for name in ("data", "model")}, trained["reads"]
    now = {name: {key: getattr(getattr(config, name), key, None) for key in before[name]} for name in before}
    if changed := differences(before, now):
        raise CheckpointError(f"{run / 'config.json'} is not what the run was trained with: {'; '.join(changed)}.")
    for name, found in vocabularies.items():
        wanted = reads.get(f"bpe/{Path(name).name}")
        if wanted is None:
            raise CheckpointError(f"{name} is none of the vocabularies that {run} was trained with.")
        if wanted != found:
            raise CheckpointError(
                f"{name} has SHA-256 {found}, but the run was trained with {wanted}: put that one back."
            )
    path = run / "normalisation.json"
    if path.is_file() and sha256_of(path) != reads.get("clean/normalisation.json"):
        raise CheckpointError(f"{path} is not what the run was trained with; put that one back.")


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
