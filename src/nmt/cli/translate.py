"""The commands that take text: translate, eval and score."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from nmt import config as settings
from nmt.cli.options import AsJson, Changes, Device, RunFolder, print_result
from nmt.config import Config
from nmt.errors import ConfigError, DataError
from nmt.io import STANDARD, lines_of, read_aligned, read_json, read_lines
from nmt.languages import parse
from nmt.pipeline import engine, stages
from nmt.runs.identity import read_identity
from nmt.runs.run_dir import RUNS, RunDir, newest_run, read_config

log = logging.getLogger(__name__)


def translate(
    source: Annotated[str, typer.Argument(metavar="[INPUT]", help="A text file; - is stdin.")] = STANDARD,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="Output file; - is stdout.")] = STANDARD,
    run: RunFolder = None,
    changes: Changes = None,
    device: Device = "auto",
    n_best: Annotated[
        int, typer.Option("--n-best", metavar="N", help="Print N translations a line: line, rank, score, text.")
    ] = 1,
    scores: Annotated[bool, typer.Option("--scores", help="Print the same columns for the best translation.")] = False,
    greedy: Annotated[bool, typer.Option("--greedy", help="Greedy search (translate.beam=1).")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of beam search.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from the K most likely tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Sampling seed.")] = 1,
    max_length: Annotated[
        int, typer.Option("--max-length", help="Maximum output length in tokens; 0: by the source.")
    ] = 0,
    prefix: Annotated[
        Path | None, typer.Option("--prefix", metavar="FILE", help="Forced target prefix of each line.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--buffer", metavar="N", min=1, help="Lines to read before translating; 1: line by line."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing output file.")] = False,
) -> None:
    """Translate a file, or stdin line by line."""
    from nmt.decoding.files import translate_file
    from nmt.decoding.options import Options
    from nmt.decoding.translator import Translator

    if output != STANDARD and Path(output).exists() and not force:
        raise ConfigError(f"{output} exists; give --force to write over it.")
    options = Options(
        n_best=n_best,
        sample=sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_length=max_length,
    )
    run, config = _run_and_settings(run, [*(changes or ()), *(["translate.beam=1"] if greedy else [])])
    translator = Translator.load(run, config.translate, device=device)
    translate_file(translator, source, output, options, table=scores, prefix_file=prefix, window=window)


def evaluate(
    hyps: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HYP]...", help="Translations to score; none: those of the run; several: compared."),
    ] = None,
    refs: Annotated[
        list[Path] | None,
        typer.Option("--ref", metavar="FILE", help="References, else those of the test set; repeatable."),
    ] = None,
    src: Annotated[Path | None, typer.Option("--src", metavar="FILE", help="Sources of HYP, with --ref.")] = None,
    tgt: Annotated[str | None, typer.Option("--tgt", metavar="LANG", help="Language of HYP, with --ref.")] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="Earlier scores.json to compare with.")
    ] = None,
    run: RunFolder = None,
    allow_overlap: Annotated[
        bool, typer.Option("--allow-overlap", help="Score the test set even if the run was trained on part of it.")
    ] = False,
    changes: Changes = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score translations: BLEU, chrF and TER with signatures."""
    if hyps and refs:
        if tgt is None:
            raise ConfigError("--ref needs --tgt: BLEU depends on the language (--tgt zh).")
        try:
            parse(tgt)
        except ConfigError as error:
            raise ConfigError(f"--tgt: {error}") from None
        found, lines = _against_files(hyps, refs, src, tgt, settings.load(None, changes or ()))
    else:
        if refs or src or tgt:
            raise ConfigError("--ref, --src and --tgt go with HYP files and with each other: nmt eval HYP --ref REF.")
        found, lines = _against_test_set(hyps or [], run, changes or (), device, allow_overlap)
    if against is not None:
        lines = [*lines, *_compared(found, against)]
    print_result(found, lines, as_json)


def _compared(found: Any, against: Path) -> list[str]:
    """Compare with the scores of an earlier result; raise DataError where the two are not comparable."""
    from nmt.evaluation.metrics import check_comparable
    from nmt.evaluation.report import better_if

    earlier = read_json(against)
    if "split" not in earlier or "split" not in found:
        raise ConfigError(
            f"--against {against}: that is no scores.json of nmt eval, or HYP has no --src to know its set by."
        )
    try:
        check_comparable(found, earlier)
        pairs = [(earlier["scores"][name], now) for name, now in found["scores"].items() if name in earlier["scores"]]
        return [
            f"{now['name']} against {against}: {was['value']:.2f} -> {now['value']:.2f}{better_if(now['name'])}"
            for was, now in pairs
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--against {against}: that is no scores.json of nmt eval (it lacks {error}).") from error


def _against_files(
    hyps: Sequence[str], refs: Sequence[Path], src: Path | None, tgt: str, config: Config
) -> tuple[Any, list[str]]:
    """Score translations against reference files."""
    from nmt.evaluation import metrics, report

    # As in SET.refs.LANG of clean, a TAB sets further references of a line apart.
    cells = ([ref for text in row for ref in text.split("\t")] for row in read_aligned(*refs))
    systems, rows = _systems(hyps), [[ref for ref in row if ref] or [""] for row in cells]
    if len(systems) > 1:
        compared = metrics.compare(systems, rows, tgt, config.eval)
        return compared, report.comparison_lines(compared)
    (lines,) = systems.values()
    if src is not None:
        result = report.evaluate(lines, read_lines(src), rows, tgt, config.eval)
        return result, report.report_lines(result)
    scores = metrics.score(lines, rows, tgt, config.eval)
    plain = {name: asdict(one) for name, one in scores.items()}
    return plain, report.score_lines(plain)


def _against_test_set(
    hyps: Sequence[str], given: Path | None, changes: Sequence[str], device: str, allow_overlap: bool
) -> tuple[Any, list[str]]:
    """Score a run's own translation, or others, on the run's test set."""
    from nmt.evaluation.test_set import evaluate_test, read_test_set, score_lines
    from nmt.runs.overlap import check_unseen

    run, config = _run_and_settings(given, changes)
    if run.resolve().parent != RUNS.resolve():
        raise ConfigError(f"{run} is not in {RUNS}/, so its test set is not known; give HYP, --ref and --tgt.")
    build = partial(stages.build_stages, config, run.resolve().name, device=device, allow_overlap=allow_overlap)
    states = {state.stage.name: state for state in engine.status(build())}
    clean, train = states["clean"], states["train"]
    if clean.word != "up_to_date":
        raise DataError(f"{clean}; its test set is what is scored, so make it first (nmt clean).")
    if run.identity_file.exists():
        data = "encode/meta.json"
        if train.stage.hashes.get(data) != read_identity(run)["reads"].get(data):
            log.warning("the corpus has changed since %s was trained: this is another test set than its own", run)
    folder = clean.stage.writes
    # Here too: a score that was allowed once may be there already.
    srcs, refs = read_test_set(folder, config.data.src, config.data.tgt)
    seen = check_unseen(run, config.data.src, srcs, refs, allow_overlap)
    if not hyps:
        result = read_json(engine.run(build, since="translate").evaluate.writes / "scores.json")
        return result, score_lines(result)
    systems = _systems(hyps)
    if len(systems) > 1:
        from nmt.evaluation import metrics, report

        compared = metrics.compare(systems, refs, config.data.tgt, config.eval)
        return compared, report.comparison_lines(compared)
    (lines,) = systems.values()
    result = evaluate_test(config, folder, lines, trained_on=seen)
    return result, score_lines(result)


def score(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Source sentences, one a line.")],
    tgt: Annotated[Path, typer.Argument(metavar="TGT", help="Their translations, line by line.")],
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="Output file; - is stdout.")] = STANDARD,
    run: RunFolder = None,
    changes: Changes = None,
    device: Device = "auto",
) -> None:
    """Print the log-probability of existing translations."""
    from nmt.decoding.files import score_files
    from nmt.decoding.translator import Translator

    run, config = _run_and_settings(run, changes or ())
    score_files(Translator.load(run, config.translate, device=device), src, tgt, output)


def _run_and_settings(given: Path | None, changes: Sequence[str]) -> tuple[RunDir, Config]:
    """Return the run and its settings with overrides; raise ConfigError if they contradict its training."""
    run = RunDir(given) if given else newest_run()
    if given is None:
        log.info("taking %s, the newest run that is finished", run)
    trained, status = read_config(run), run.status()
    if status.get("state") != "finished" and run.final.is_dir():
        made_of = run.final_state().get("made_of")
        log.warning(
            "the training of %s has not ended (%s, step %s); its final model (%s) is not the one that will come of it",
            *(run, status.get("state", "unknown"), status.get("step"), made_of),
        )
    config = settings.change(trained, changes)
    expected = replace(trained, translate=config.translate, eval=config.eval)
    decided = settings.differences(settings.to_dict(expected), settings.to_dict(config))
    if decided:
        raise ConfigError(
            f"{run} was trained with other settings, which decide here:",
            *(f"  {line}" for line in decided),
            "Only those of translate and eval can be changed for a model that is trained.",
        )
    return run, config


def _systems(hyps: Sequence[str]) -> dict[str, list[str]]:
    if len(set(hyps)) < len(hyps):
        raise ConfigError("the same HYP is given twice; a comparison needs different ones.")
    systems = {name: _lines(name) for name in hyps}
    for name, lines in systems.items():
        if any(lines) and all("\t" in line for line in lines if line):
            raise DataError(
                f"{name} is a table, with TABs in all of its lines; give the text alone, e.g. of nmt translate "
                f"--scores or --n-best: cut -f 4 {name} > NEW"
            )
    return systems


def _lines(name: str) -> list[str]:
    """Read all lines of a file or of stdin."""
    if name == STANDARD:
        return [text for text, _ in lines_of(sys.stdin.buffer)]
    return read_lines(name)
