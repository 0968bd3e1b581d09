"""The folder of a run: where everything in it lies, who is in it, and how far it is.

A run folder is self-contained: settings, tokenizer, normalisation and weights, all that translation needs.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

from nmt.config import Config, from_dict
from nmt.errors import CheckpointError, ConfigError
from nmt.io import read_json, write_json

RUNS = Path(os.environ.get("NMT_RUNS") or "runs")
"""Where all runs are. The variable is for doctor, whose trainings leave the user's runs alone."""


class RunDir(PosixPath):
    """A path that knows what lies in a run folder."""

    @property
    def config_file(self) -> Path:
        """The settings, as they were given."""
        return Path(self / "config.json")

    @property
    def identity_file(self) -> Path:
        """What decided the result; written last when a run is opened."""
        return Path(self / "identity.json")

    @property
    def numerics_file(self) -> Path:
        """What changes rounding alone."""
        return Path(self / "numerics.json")

    @property
    def provenance_file(self) -> Path:
        """Where, when and with what it was trained."""
        return Path(self / "provenance.json")

    @property
    def status_file(self) -> Path:
        """How far the training is."""
        return Path(self / "status.json")

    @property
    def metrics_file(self) -> Path:
        """Every measurement, one JSON object a line."""
        return Path(self / "metrics.jsonl")

    @property
    def normalisation_file(self) -> Path:
        """How a line of each language is normalised."""
        return Path(self / "normalisation.json")

    @property
    def tokenizer(self) -> Path:
        """SentencePiece models and vocabularies."""
        return Path(self / "tokenizer")

    @property
    def checkpoints(self) -> Path:
        """What a training can be resumed from."""
        return Path(self / "checkpoints")

    @property
    def best(self) -> Path:
        """The weights that scored best on the dev set."""
        return Path(self / "best")

    @property
    def final(self) -> Path:
        """The weights that the run translates with."""
        return Path(self / "final")

    @property
    def average(self) -> Path:
        """An average that `nmt average` made and that is not better than the final weights."""
        return Path(self / "average")

    @property
    def former_final(self) -> Path:
        """The final weights that an average by hand has replaced."""
        return Path(self / "final-before")

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return Path(self / "tensorboard")

    @property
    def heartbeat(self) -> Path:
        """What each process does at the moment."""
        return Path(self / "heartbeat")

    @property
    def train_keys(self) -> Path:
        """Hashes of the sentences that the weights were trained on."""
        return Path(self / "train_keys")

    @property
    def translation(self) -> Path:
        """The folder of the stage `translate`."""
        return Path(self / "translate")

    @property
    def hypotheses_file(self) -> Path:
        """The translated test set."""
        return self.translation / "test.hyp"

    @property
    def evaluation(self) -> Path:
        """The folder of the stage `eval`."""
        return Path(self / "eval")

    @property
    def scores_file(self) -> Path:
        """The scores of the translated test set."""
        return self.evaluation / "scores.json"

    @property
    def made_by_training(self) -> list[Path]:
        """All that a training and the stages after it have put here, but for what says which run it is."""
        return [
            *(self.checkpoints, self.best, self.final, self.average, self.former_final, self.tensorboard),
            *(self.heartbeat, self.train_keys, self.translation, self.evaluation),
            *(self.metrics_file, self.identity_file, self.status_file, self.numerics_file, self / "stamp.json"),
        ]

    def tokenizer_files(self) -> list[Path]:
        """The SentencePiece models and their readable vocabularies."""
        return tokenizer_files(self.tokenizer)

    def status(self) -> dict[str, Any]:
        """What status.json says; empty where there is none that can be read."""
        return read_json(self.status_file)

    def write_status(self, values: dict[str, Any]) -> None:
        """Write what becomes of the training."""
        write_json(self.status_file, values)

    def final_state(self) -> dict[str, Any]:
        """What the final weights are made of, and their scores; empty where there are none."""
        return read_json(self.final / "state.json")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second training out while the block runs; the kernel frees it if the process dies."""
        try:
            self.mkdir(parents=True, exist_ok=True)
            stream = open(self / "lock", "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {self}: {error.strerror}.") from error
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                stream.seek(0)
                who = stream.read().strip() or "unknown"
                raise ConfigError(f"another training is in {self} ({who}); wait for it, or give a --name.") from error
            stream.truncate(0)
            stream.write(f"pid {os.getpid()} on {socket.gethostname()}")
            stream.flush()
            yield


def tokenizer_files(folder: Path) -> list[Path]:
    """The SentencePiece models and their readable vocabularies in a folder."""
    return sorted([*folder.glob("*.model"), *folder.glob("*.vocab")])


def read_config(run: Path) -> Config:
    """The settings that a run was trained with; raises CheckpointError if the folder is no run."""
    try:
        return from_dict(json.loads(RunDir(run).config_file.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{run} is no run folder: its config.json cannot be read ({error}).") from error
    except ConfigError as error:
        more = f" And {len(error.problems) - 1} more" if len(error.problems) > 1 else ""
        raise CheckpointError(
            f"{RunDir(run).config_file} was written by another version of nmt ({error.problems[0]}{more}). Use that "
            "version, which provenance.json names, or train again with nmt train --fresh."
        ) from error


def newest_run() -> RunDir:
    """The run whose training finished last; raises CheckpointError where none has."""
    runs = [RunDir(path.parent) for path in RUNS.glob("*/status.json")]
    finished = [run for run in runs if run.status().get("state") == "finished"]
    if not finished:
        raise CheckpointError(f"no finished training in {RUNS}/; make one (nmt run -c demo) or name a run with --run.")
    return max(finished, key=lambda run: run.status_file.stat().st_mtime_ns)
