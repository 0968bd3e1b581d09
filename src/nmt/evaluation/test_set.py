"""The score of a run on its test set, whole and by the parts of the corpus."""

from pathlib import Path
from typing import Any

from nmt.config import Config
from nmt.errors import counted
from nmt.evaluation.report import evaluate, report_lines
from nmt.io import read_lines, read_object

MOST_PARTS = 5
"""Different attributions of a test set that are told apart; more are people, not parts of a corpus."""


def read_test_set(clean: Path, src: str, tgt: str) -> tuple[list[str], list[list[str]]]:
    """The sources of the test set, and all references of each line."""
    return read_lines(clean / f"test.{src}"), [row.split("\t") for row in read_lines(clean / f"test.refs.{tgt}")]


def evaluate_test(config: Config, clean: Path, hyps: list[str], *, trained_on: int) -> dict[str, Any]:
    """`nmt.evaluation.report.evaluate` on the test set, and on each of its parts where the corpus is made of a few.

    `trained_on` is how many of its lines the run was trained on; `reference_form` in the result is what `clean` says of
    references that are not in the form of the training text, or None.
    """
    src, tgt = config.data.src, config.data.tgt
    srcs, refs = read_test_set(clean, src, tgt)
    train = (read_lines(clean / f"train.{src}"), read_lines(clean / f"train.{tgt}"))
    result = evaluate(hyps, srcs, refs, tgt, config.eval, train)
    result["trained_on"] = trained_on
    report = clean / "report.json"
    form = read_object(report).get("reference_form", {}) if report.is_file() else {}
    result["reference_form"] = form.get("test", {}).get(tgt)
    attribution = clean / "test.attribution"
    names = read_lines(attribution) if attribution.is_file() else []
    if 1 < len(set(names)) <= MOST_PARTS:
        result["parts"] = {}
        for part in sorted(set(names)):
            rows = [row for row, name in enumerate(names) if name == part]
            part_hyps, part_srcs = ([texts[row] for row in rows] for texts in (hyps, srcs))
            part_refs = [refs[row] for row in rows]
            result["parts"][part] = evaluate(part_hyps, part_srcs, part_refs, tgt, config.eval, train)
    return result


def score_lines(result: dict[str, Any]) -> list[str]:
    """Format a result of `evaluate_test` for the terminal, each part with its baseline."""
    lines = report_lines(result)
    form = result.get("reference_form")
    if form and form["bleu"] < 99.95:
        lines.append(
            f"{100 * form['share']:.1f} % of the references are not in the form of the training text (script, marks); "
            f"a perfect translation in that form has BLEU {form['bleu']:.1f}\n  {form['signature']}"
        )
    if result.get("trained_on"):
        share = result["trained_on"] / result["lines"]
        lines.append(
            f"{counted(result['trained_on'], 'test line')} ({share:.1%}) with a sentence that the run was trained on"
        )
    for name, part in result.get("parts", {}).items():
        bleu, baseline = part["scores"]["bleu"], part["baseline"]["bleu"]["value"]
        lines.append(
            f"{name or '(no attribution)'}: BLEU {bleu['value']:.2f} on {counted(part['lines'], 'line')}   "
            f"baseline {baseline:.2f}, {bleu['value'] - baseline:+.2f}\n  {bleu['signature']}"
        )
    return lines
