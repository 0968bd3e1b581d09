"""The full report on the translation of a test set, as JSON values and as lines for the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nmt.config import EvalConfig
from nmt.errors import counted
from nmt.evaluation.baselines import baseline_translations, human_score
from nmt.evaluation.metrics import Refs, as_plain, bleu, check_counts, check_texts, content_hash, score_all
from nmt.evaluation.outputs import suspicious

LOWER_IS_BETTER = {"ter"}


LENGTHS = (1, 6, 11, 21, 41)
"""Where the rows of the table of source lengths begin."""


def evaluate(
    hyps: Sequence[str],
    srcs: Sequence[str],
    refs: Refs,
    tgt: str,
    settings: EvalConfig,
    train: tuple[Sequence[str], Sequence[str]] | None = None,
) -> dict[str, Any]:
    """The report of `nmt eval` as plain values for JSON; the baseline needs the training text."""
    check_counts(hypotheses=hyps, sources=srcs, references=refs)
    check_texts(tgt, hypotheses=hyps, references=refs)
    first = [row[:1] for row in refs]
    several = any(len(row) > 1 for row in refs)
    baseline = (
        score_all(baseline_translations(*train, srcs), first, tgt, replace(settings, bootstrap=0)) if train else {}
    )
    return {
        "lines": len(hyps),
        "split": {"sources": content_hash(srcs), "references": content_hash(refs)},
        "scores": as_plain(score_all(hyps, first, tgt, settings)),
        "scores_all_references": as_plain(score_all(hyps, refs, tgt, settings)) if several else None,
        "baseline": as_plain(baseline) or None,
        "human": human_score(refs, tgt),
        "outputs": suspicious(hyps, srcs),
        "lengths": by_length(hyps, srcs, first, tgt),
    }


def by_length(hyps: Sequence[str], srcs: Sequence[str], refs: Refs, tgt: str) -> dict[str, Any]:
    """BLEU by length of the source: in words, or in characters where it is written without spaces."""
    letters = [letter for src in srcs for letter in src if letter.isalpha()]
    # From the CJK radicals up to Hangul, which has spaces.
    unspaced = 2 * sum("\u2e80" <= letter < "\uac00" for letter in letters) > len(letters)
    unit = "characters" if unspaced else "words"
    lengths = [len("".join(src.split())) if unspaced else len(src.split()) for src in srcs]
    rows = []
    for least, above in zip(LENGTHS, (*LENGTHS[1:], None), strict=True):
        inside = [i for i, n in enumerate(lengths) if least <= max(1, n) and (above is None or n < above)]
        if inside:
            found = bleu([hyps[i] for i in inside], [refs[i] for i in inside], tgt)
            most = above - 1 if above else None
            counts = {"from": least, "to": most, "lines": len(inside)}
            rows.append({**counts, "bleu": found.value, "length_ratio": found.length_ratio})
    return {"unit": unit, "rows": rows}


def report_lines(result: Mapping[str, Any]) -> list[str]:
    """Format a result of `evaluate` for the terminal, each score with its signature and baseline."""
    lines = [
        *score_lines(result["scores"], baseline=result["baseline"]),
        *score_lines(result["scores_all_references"] or {}, ", all references"),
    ]
    human = result["human"]
    if human:
        people = f"Human score (one reference against the others, on {counted(human['lines'], 'line')} with several)"
        lines += [f"{people}: BLEU {human['bleu']['value']:.2f}", f"  {human['bleu']['signature']}"]
    best, outputs = result["scores"]["bleu"], result["outputs"]
    lines.append(
        f"{counted(result['lines'], 'line')}; length {best['length_ratio']:.3f} of the references (brevity penalty "
        f"{best['brevity_penalty']:.3f}); outputs: {', '.join(f'{n:,} {kind}' for kind, n in outputs.items())}"
    )
    lines.append(f"{'source ' + result['lengths']['unit']:<18}{'lines':>8}{'BLEU':>8}{'length':>8}")
    for row in result["lengths"]["rows"]:
        span = f"{row['from']}-{row['to']}" if row["to"] else f"{row['from']}+"
        lines.append(f"{span:>17} {row['lines']:>8,}{row['bleu']:>8.2f}{row['length_ratio']:>8.3f}")
    return lines


def score_lines(scores: Mapping[str, Any], title: str = "", baseline: Mapping[str, Any] | None = None) -> list[str]:
    """Format each score as two lines: value, interval and baseline; signature."""
    lines = []
    for name, found in scores.items():
        text = f"{found['name']}{title}: {found['value']:.2f}{_uncertainty(found)}"
        if baseline:
            text += "   " + baseline_text(name, found["value"], baseline[name]["value"])
        lines += [text, f"  {found['signature']}"]
    return lines


def baseline_text(metric: str, value: float, baseline: float) -> str:
    """Format the nearest-neighbour baseline and the difference to it, with its direction where lower is better."""
    if not better_if(metric):
        return f"baseline {baseline:.2f}, {value - baseline:+.2f}"
    side = "better" if value <= baseline else "worse"
    return f"baseline {baseline:.2f}, {abs(value - baseline):.2f} {side}{better_if(metric)}"


def better_if(metric: str) -> str:
    """What a reader must know of a metric of which less is better."""
    return " (lower is better)" if metric.lower() in LOWER_IS_BETTER else ""


def _uncertainty(found: Mapping[str, Any]) -> str:
    if found["interval"] is not None:
        return f" ({found['mean']:.2f} ± {found['interval']:.2f})"
    return f" (no interval: {found['no_interval']})" if found.get("no_interval") else ""


def comparison_lines(found: Mapping[str, Any]) -> list[str]:
    """A result of `compare` as a table for the terminal."""
    lines = []
    for metric, table in found["scores"].items():
        width = max(map(len, table["systems"])) + 2
        lines.append(f"{metric}{better_if(metric)}  {table['signature']}")
        for name, row in table["systems"].items():
            p = "not tested (eval.bootstrap is 0)" if row["p"] is None else f"p = {row['p']:.4f}"
            verdict = "baseline" if name == found["baseline"] else p
            lines.append(f"  {name:<{width}}{row['value']:>7.2f}{_uncertainty(row)}  {verdict}")
    return lines
