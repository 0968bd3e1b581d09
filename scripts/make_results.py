"""The tables of scores in README.md and docs/experiments.md: from finished runs of one commit, by nothing else.

    python scripts/make_results.py fixed=runs/fixed.en-zh own=runs/cmn-small.en-zh demo=runs/demo.en-zh > results.md

Each word names a split and a run on it; run it where `data/` and `runs/` are. Prints Markdown: the commit, a row for
each run and for each part of a test set that has parts, the signatures, and the command of each run. Refuses runs that
are not finished or not up to date, of different commits, of code that differs from its commit, or whose training or
scoring had more than one commit.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.errors import DataError, NmtError
from nmt.io import read_lines, read_object
from nmt.pipeline import engine, stages
from nmt.runs.run_dir import RUNS, read_config

LEFT, RIGHT = (
    ("split", "direction"),
    ("train pairs", "test lines", "updates", "dev BLEU", "BLEU (95 %)", "baseline", "chrF"),
)


@dataclass(frozen=True)
class Result:
    """A finished run on a split."""

    split: str
    run: Path
    commit: str
    versions: dict[str, Any]
    command: str
    direction: str
    train_pairs: int
    updates: int
    dev_bleu: float | None
    """Of the final model on the whole dev set; None where it was not chosen by BLEU."""
    scores: dict[str, Any]
    """What `nmt eval` found."""


def read_result(split: str, run: Path) -> Result:
    """What a run folder says of itself; raises NmtError if that can't stand in a table."""
    if run.resolve().parent != RUNS.resolve():
        raise DataError(f"{run} is not in {RUNS}/ of this folder, so it is not known whether it is up to date.")
    config, provenance = read_config(run), read_object(run / "provenance.json")
    states = engine.status(stages.build_stages(config, run.name))
    if outdated := [state for state in states if state.word != "up_to_date"]:
        raise DataError(f"{run} is not up to date ({outdated[0]}); finish it with nmt run.")
    final, status = read_object(run / "final" / "state.json"), read_object(run / "status.json")
    scores = read_object(states[-1].stage.writes / "scores.json")
    if scores.get("trained_on"):
        raise DataError(f"{run} was trained on {scores['trained_on']} lines of its test set.")
    # An average by hand may have been compared with nothing; then nothing is said.
    by_bleu = config.train.early_stop_metric == "bleu" and config.train.validate_sentences
    compared = final.get("dev_scores", {}).get(str(final.get("made_of")).removesuffix(" (nmt average)"))
    return Result(
        split=split,
        run=run,
        commit=one_commit(run, [*provenance.get("earlier", []), provenance, scores.get("code", {})]),
        versions=provenance["packages"],
        command=shlex.join(["nmt", *provenance["command"][1:]]),
        direction=f"{config.data.src}→{config.data.tgt}",
        train_pairs=len(read_lines(states[0].stage.writes / f"train.{config.data.src}")),
        updates=status["step"],
        dev_bleu=compared if by_bleu else None,
        scores=scores,
    )


def one_commit(what: Path | str, codes: Sequence[dict[str, Any]]) -> str:
    """The commit that all code had; raises DataError if there are several or none, or if files differ from it."""
    commits = {code.get("commit") for code in codes}
    if len(commits) > 1:
        raise DataError(f"{what} is of several commits: {', '.join(sorted(map(str, commits)))}.")
    (commit,) = commits
    if commit is None:
        raise DataError(f"{what} doesn't say of which commit it is; train in a clone of nmt that has git.")
    if any(code.get("dirty") is not False for code in codes):
        raise DataError(f"{what} is of code that differs from its commit {commit[:12]}; commit it and train again.")
    return str(commit)


def row(split: str, result: Result, scores: dict[str, Any], dev_bleu: float | None) -> list[str]:
    """A row of the table: of the whole test set, or of a part of it."""
    best, chrf, baseline = scores["scores"]["bleu"], scores["scores"].get("chrf"), scores.get("baseline")
    interval = best.get("interval")
    return [
        split,
        result.direction,
        f"{result.train_pairs:,}",
        f"{scores['lines']:,}",
        f"{result.updates:,}",
        "" if dev_bleu is None else f"{dev_bleu:.2f}",
        f"{best['value']:.2f}" + ("" if interval is None else f" ± {interval:.2f}"),
        f"{baseline['bleu']['value']:.2f}" if baseline else "",
        f"{chrf['value']:.2f}" if chrf else "",
    ]


def tables(results: Sequence[Result]) -> list[str]:
    """All of it as lines of Markdown."""
    commit = one_commit("the table", [{"commit": result.commit, "dirty": False} for result in results])
    versions = {", ".join(f"{name} {found}" for name, found in result.versions.items()) for result in results}
    if len(versions) > 1:
        raise DataError(f"these runs are of several versions: {'; '.join(sorted(versions))}.")
    lines = [f"Commit `{commit}`; {versions.pop()}.", ""]
    lines += ["| " + " | ".join((*LEFT, *RIGHT)) + " |"]
    lines += ["|" + " --- |" * len(LEFT) + " ---: |" * len(RIGHT)]
    for result in results:
        rows = [row(result.split, result, result.scores, result.dev_bleu)]
        for name, part in result.scores.get("parts", {}).items():
            rows.append(row(f"{result.split}: {name or 'no attribution'}", result, part, None))
        lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |" for cells in rows]
    signatures: dict[str, list[str]] = {}
    for result in results:
        for found in result.scores["scores"].values():
            told = f"{found['name']}: `{found['signature']}`"
            signatures.setdefault(told, [])
            if result.direction not in signatures[told]:
                signatures[told].append(result.direction)
    lines += ["", *(f"* {', '.join(directions)}, {told}" for told, directions in signatures.items())]
    lines += ["", *(f"* {r.split}, {r.direction}: `{r.command}`" for r in results)]
    return lines


def parsed(words: Sequence[str]) -> list[tuple[str, Path]]:
    """The splits and runs of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="SPLIT=RUN", help="the name of a split, and a run on it")
    pairs = [word.partition("=")[::2] for word in parser.parse_args(words).runs]
    if wrong := [name for name, run in pairs if not name or not run]:
        parser.error(f"{wrong[0] or 'the split'} is missing a part; give SPLIT=RUN")
    return [(split, Path(run)) for split, run in pairs]


def main(words: Sequence[str]) -> None:
    """Print the tables."""
    for line in tables([read_result(split, run) for split, run in parsed(words)]):
        print(line)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except NmtError as error:
        sys.exit(str(error))
