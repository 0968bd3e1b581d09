"""The commands that walk the street, whole or in part."""

import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nmt import pipeline, stages
from nmt.cli.options import AsJson, Changes, Device, Name, Processes, Recipe, load, table, tell
from nmt.config import Config, check_name
from nmt.errors import ConfigError

if TYPE_CHECKING:
    from nmt.provenance import TrainPaths

Stages = Sequence[pipeline.Stage]


def fetch(
    corpus: Annotated[
        str, typer.Argument(metavar="CORPUS", help="cmn, mini (it ships with nmt), or a name for a corpus of yours.")
    ],
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="PATH|URL", help="A file, a zip or a URL instead of the usual place."),
    ] = None,
    sha256: Annotated[str | None, typer.Option("--sha256", metavar="HEX", help="What the file must be.")] = None,
    as_json: AsJson = False,
) -> None:
    """Get a raw corpus into data/CORPUS/raw/."""
    from nmt.corpus import fetch as fetch_corpus

    check_name("CORPUS", corpus)
    facts = fetch_corpus(corpus, origin, stages.DATA / corpus / "raw", sha256)
    tell(facts, table(facts), as_json)


def clean(
    config: Recipe = None,
    changes: Changes = None,
    encoding: Annotated[
        str | None, typer.Option("--encoding", metavar="NAME", help="Of the raw files: the setting clean.encoding.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Filter, normalise and split the raw corpus."""
    changes = [*(changes or ()), *([f"clean.encoding={encoding}"] if encoding else [])]
    from nmt.corpus import print_report

    report = pipeline.read_json(_walk(config, changes, "clean").writes / "report.json")
    tell(report, print_report(report), as_json)


def bpe(config: Recipe = None, changes: Changes = None, as_json: AsJson = False) -> None:
    """Train the subword vocabulary and prove it."""
    certificate = pipeline.read_json(_walk(config, changes, "bpe").writes / "certificate.json")
    from nmt.tokenizer import certificate_lines

    tell(certificate, certificate_lines(certificate), as_json)


def encode(config: Recipe = None, changes: Changes = None, as_json: AsJson = False) -> None:
    """Turn the clean text into token ids."""
    meta = pipeline.read_json(_walk(config, changes, "encode").writes / "meta.json")
    from nmt.dataset import table_of_counts

    tell(meta["splits"], table_of_counts(meta), as_json)


def _walk(config: str | None, changes: Sequence[str] | None, upto: str) -> pipeline.Stage:
    loaded = load(config, changes)
    return {stage.name: stage for stage in pipeline.run(partial(stages.street, loaded), upto)}[upto]


def train(
    config: Recipe = None,
    changes: Changes = None,
    name: Name = None,
    device: Device = "auto",
    processes: Processes = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin again, whatever the run has.")] = False,
    init_from: Annotated[
        Path | None, typer.Option("--init-from", metavar="RUN", help="Begin with the weights of another run.")
    ] = None,
) -> None:
    """Train the model, going on where it stopped.

    The data is made first where it is missing or out of date. Ctrl-C and SIGTERM end the training after a save, and
    the same command resumes it. The log says first what is trained, on what and for how many steps and epochs;
    runs/NAME/metrics.jsonl and TensorBoard have every measurement.
    """
    loaded = load(config, changes)
    here = partial(stages.train_here, device=device, fresh=fresh, init_from=init_from)
    if _launched():
        states = pipeline.status(stages.street(loaded, name, device=device, trainer=here))
        if any(state.word != "fresh" for state in states[:3]):
            line = shlex.join(["nmt", "run", *_again(config, changes), "--upto", "encode"])
            raise ConfigError(f"several processes can't make the data; make it first: {line}")
        pipeline.act(states[3].stage)
        return
    options = [*_again(config, changes, name, device), *(["--fresh"] if fresh else [])]
    options += ["--init-from", str(init_from)] if init_from else []
    processes = processes or _processes(loaded, device)
    trainer = here if processes == 1 else partial(_launch, options, processes)
    street = partial(stages.street, loaded, name, device=device, trainer=trainer)
    if fresh or init_from:  # The stage doesn't know what weights it would begin with; the training does.
        pipeline.act({stage.name: stage for stage in pipeline.run(street, "encode")}["train"])
    else:
        pipeline.run(street, "train")


def run(
    config: Recipe = None,
    changes: Changes = None,
    name: Name = None,
    device: Device = "auto",
    processes: Processes = 0,
    upto: Annotated[str | None, typer.Option("--upto", metavar="STAGE", help="The last stage to do.")] = None,
    as_json: AsJson = False,
) -> None:
    """Walk the whole street; what is fresh is skipped.

    From the raw corpus of a recipe to the scores of its model, which go to stdout; the log goes to stderr. The corpus
    of the recipe demo ships with nmt, and it takes a few minutes on a CPU: nmt run -c demo
    """
    loaded = load(config, changes)
    if _launched():
        line = shlex.join(["nmt", "run", *_again(config, changes, name), "--processes", os.environ["WORLD_SIZE"]])
        raise ConfigError(f"nmt run is one process, which starts others for the training alone: {line}")
    processes = processes or _processes(loaded, device)
    trainer = None if processes == 1 else partial(_launch, _again(config, changes, name, device), processes)
    walked = pipeline.run(partial(stages.street, loaded, name, device=device, trainer=trainer), upto)
    if upto in (None, "eval"):
        from nmt.evaluation import score_lines

        result = pipeline.read_json(walked[-1].writes / "scores.json")
        tell(result, score_lines(result), as_json)


def status(config: Recipe = None, changes: Changes = None, name: Name = None, as_json: AsJson = False) -> None:
    """Say what is fresh, what is not, and why."""
    states = pipeline.status(stages.street(load(config, changes), name))
    facts = [
        {"stage": s.stage.name, "state": s.word, "reason": s.reason, "folder": str(s.stage.writes)} for s in states
    ]
    tell(facts, map(str, states), as_json)


def _launched() -> bool:
    """Whether torchrun, or our own launch, started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _again(
    config: str | None, changes: Sequence[str] | None, name: str | None = None, device: str = "auto"
) -> list[str]:
    """The same settings as words of another command line."""
    words = ["-c", config] if config else []
    words += [word for change in changes or () for word in ("--set", change)]
    words += ["--name", name] if name else []
    return words + (["--device", device] if device != "auto" else [])


def _processes(config: Config, device: str) -> int:
    """How many processes train if nobody says how many."""
    from nmt.launch import processes_for

    return processes_for(device, config.train.batch_tokens)


def _launch(options: list[str], processes: int, config: Config, paths: "TrainPaths") -> None:
    """Train in several processes of this machine."""
    from nmt.launch import launch

    code = launch(["-m", "nmt", "train", *options], processes)
    if code:
        raise typer.Exit(code)
