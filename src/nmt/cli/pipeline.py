"""The commands that run the pipeline or a part of it."""

import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from nmt.cli.options import AsJson, Changes, Device, Name, Processes, Recipe, load, print_result, table
from nmt.cli.worker import train_in_processes
from nmt.config import Config, check_name
from nmt.distributed.launcher import is_main, processes_for
from nmt.errors import ConfigError
from nmt.io import read_json
from nmt.pipeline import engine, stages
from nmt.runs.identity import TrainPaths


def fetch(
    corpus: Annotated[
        str, typer.Argument(metavar="CORPUS", help="cmn, mini (bundled), or a name for your own corpus.")
    ],
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="PATH|URL", help="File, zip archive or URL to use instead of the default."),
    ] = None,
    sha256: Annotated[str | None, typer.Option("--sha256", metavar="HEX", help="Expected SHA-256 of the file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download or copy a raw corpus into data/CORPUS/raw/."""
    from nmt.corpus import fetch as fetch_corpus

    check_name("CORPUS", corpus)
    facts = fetch_corpus(corpus, origin, stages.DATA / corpus / "raw", sha256)
    print_result(facts, table(facts), as_json)


def clean(
    config: Recipe = None,
    changes: Changes = None,
    encoding: Annotated[
        str | None, typer.Option("--encoding", metavar="NAME", help="Encoding of the raw files (sets clean.encoding).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Filter, normalise and split the raw corpus."""
    changes = [*(changes or ()), *([f"clean.encoding={encoding}"] if encoding else [])]
    from nmt.corpus import print_report

    report = read_json(_run_until(config, changes, "clean").writes / "report.json")
    print_result(report, print_report(report), as_json)


def bpe(config: Recipe = None, changes: Changes = None, as_json: AsJson = False) -> None:
    """Train the subword vocabulary and verify it."""
    verification = read_json(_run_until(config, changes, "bpe").writes / "verification.json")
    from nmt.data.train_tokenizer import verification_lines

    print_result(verification, verification_lines(verification), as_json)


def encode(config: Recipe = None, changes: Changes = None, as_json: AsJson = False) -> None:
    """Encode the clean text as token ids."""
    meta = read_json(_run_until(config, changes, "encode").writes / "meta.json")
    from nmt.data.dataset import table_of_counts

    print_result(meta["splits"], table_of_counts(meta), as_json)


def _run_until(config: str | None, changes: Sequence[str] | None, upto: str) -> engine.Stage:
    loaded = load(config, changes)
    return {stage.name: stage for stage in engine.run(partial(stages.build_stages, loaded), upto)}[upto]


def train(
    config: Recipe = None,
    changes: Changes = None,
    name: Name = None,
    device: Device = "auto",
    processes: Processes = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard checkpoints and restart.")] = False,
    init_from: Annotated[
        Path | None,
        typer.Option("--init-from", metavar="RUN", help="Initialise with the final weights of another run."),
    ] = None,
) -> None:
    """Train the model, resuming from the newest checkpoint.

    Missing or outdated data is made first. Ctrl-C and SIGTERM save a checkpoint and stop; the same command resumes.
    Metrics are in runs/NAME/metrics.jsonl and TensorBoard.
    """
    loaded = load(config, changes)
    options = {"device": device, "fresh": fresh, "init_from": init_from}
    if _launched():
        made = stages.build_stages(loaded, name, device=device, trainer=_trainer(1, **options))
        states = {state.stage.name: state.word for state in engine.status(made)}
        if any(states[name] != "up_to_date" for name in ("clean", "bpe", "encode")):
            line = shlex.join(["nmt", "run", *_again(config, changes), "--upto", "encode"])
            raise ConfigError(f"several processes can't make the data; make it first: {line}")
        engine.act(made.train, stamps=is_main())
        return
    trainer = _trainer(processes or processes_for(device, loaded.train.batch_tokens), **options)
    build = partial(stages.build_stages, loaded, name, device=device, trainer=trainer)
    if fresh or init_from:  # The stage doesn't know what weights it would begin with; the training does.
        engine.act(engine.run(build, "encode").train)
    else:
        engine.run(build, "train")


def run(
    config: Recipe = None,
    changes: Changes = None,
    name: Name = None,
    device: Device = "auto",
    processes: Processes = 0,
    upto: Annotated[str | None, typer.Option("--upto", metavar="STAGE", help="Last stage to run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the whole pipeline; skip stages that are up to date.

    Scores go to stdout, the log to stderr. The recipe demo uses a bundled corpus and takes a few minutes on a CPU:
    nmt run -c demo
    """
    loaded = load(config, changes)
    if _launched():
        line = shlex.join(["nmt", "run", *_again(config, changes, name), "--processes", os.environ["WORLD_SIZE"]])
        raise ConfigError(f"nmt run is one process, which starts others for the training alone: {line}")
    trainer = _trainer(processes or processes_for(device, loaded.train.batch_tokens), device=device)
    made = engine.run(partial(stages.build_stages, loaded, name, device=device, trainer=trainer), upto)
    if upto in (None, "eval"):
        from nmt.evaluation.test_set import score_lines

        result = read_json(made.evaluate.writes / "scores.json")
        print_result(result, score_lines(result), as_json)


def status(config: Recipe = None, changes: Changes = None, name: Name = None, as_json: AsJson = False) -> None:
    """Show which stages are up to date, and why not."""
    states = engine.status(stages.build_stages(load(config, changes), name))
    facts = [
        {"stage": s.stage.name, "state": s.word, "reason": s.reason, "folder": str(s.stage.writes)} for s in states
    ]
    print_result(facts, map(str, states), as_json)


def _launched() -> bool:
    """Whether torchrun or our launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _again(config: str | None, changes: Sequence[str] | None, name: str | None = None) -> list[str]:
    """The same settings as arguments of another command."""
    words = ["-c", config] if config else []
    words += [word for change in changes or () for word in ("--set", change)]
    return words + (["--name", name] if name else [])


def _trainer(processes: int, **options: Any) -> stages.Trainer:
    """Return a function that trains here, or in several processes; `options` are those of stages.train_here."""
    if processes == 1:
        return partial(stages.train_here, **options)

    def train_there(config: Config, paths: TrainPaths) -> None:
        code = train_in_processes(config, paths, processes=processes, options=options)
        if code:
            raise typer.Exit(code)

    return train_there
