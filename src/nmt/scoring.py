"""eval: how good a translation is, by sacreBLEU on raw text, and between which floor and ceiling that number stands.

The only importer of sacrebleu. `refs` always has a list for each line: its references, one or more, the first of them
the one that the score against one reference uses.
"""

import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from nmt.config import EvalConfig
from nmt.errors import DataError

Refs = Sequence[Sequence[str]]

CHINESE = {"zh", "zho", "chi", "cmn", "yue", "wuu", "lzh", "hak", "nan", "gan", "hsn"}
UNSPACED = {"ja", "jpn", "th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod"}

FEWEST_FOR_CEILING = 20
"""Lines with several references below which their agreement says nothing."""

LENGTHS = (1, 6, 11, 21, 41)
"""Where the rows of the table of source lengths begin."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score of a whole text, from 0 to 100 (TER may be more)."""

    name: str
    value: float
    signature: str
    mean: float | None = None
    """Mean of the resamplings."""
    interval: float | None = None
    """The 95 % interval is `mean` plus and minus this."""
    brevity_penalty: float | None = None
    """BLEU alone has it."""
    length_ratio: float | None = None
    """Tokens of the hypotheses for each of the references; BLEU alone has it."""


def tokenize_for(tgt: str) -> str:
    """sacreBLEU's tokeniser for a target language; 13a would take a Chinese sentence for one word."""
    language = re.split("[-_]", tgt.lower())[0]
    return "zh" if language in CHINESE else "char" if language in UNSPACED else "13a"


def bleu(hyps: Sequence[str], refs: Refs, tgt: str) -> Score:
    """BLEU alone, without an interval."""
    return score(hyps, refs, tgt, EvalConfig(metrics=("bleu",), bootstrap=0))["bleu"]


def score(hyps: Sequence[str], refs: Refs, tgt: str, settings: EvalConfig) -> dict[str, Score]:
    """Each wanted metric of the hypotheses against all their references."""
    _check_counts(hypotheses=hyps, references=refs)
    found = {}
    for name in settings.metrics:
        metric = _metric(name, tgt)
        with _seed(settings.seed):
            result = metric.corpus_score(list(hyps), _columns(refs), n_bootstrap=settings.bootstrap)
        resampled = settings.bootstrap > 1
        found[name] = Score(
            name=result.name,
            value=float(result.score),
            signature=str(metric.get_signature()),
            mean=float(result._mean) if resampled else None,
            interval=float(result._ci) if resampled else None,
            brevity_penalty=getattr(result, "bp", None),
            length_ratio=getattr(result, "ratio", None),
        )
    return found


def evaluate(
    hyps: Sequence[str],
    srcs: Sequence[str],
    refs: Refs,
    tgt: str,
    settings: EvalConfig,
    train: tuple[Sequence[str], Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Everything that `nmt eval` knows, as plain values for JSON; with the training text it also has the floor."""
    _check_counts(hypotheses=hyps, sources=srcs, references=refs)
    first = [row[:1] for row in refs]
    several = any(len(row) > 1 for row in refs)
    floor = score(floor_translations(*train, srcs), first, tgt, replace(settings, bootstrap=0)) if train else {}
    return {
        "lines": len(hyps),
        "split": {"sources": _digest(srcs), "references": _digest(refs)},
        "scores": _plain(score(hyps, first, tgt, settings)),
        "scores_all_references": _plain(score(hyps, refs, tgt, settings)) if several else None,
        "floor": _plain(floor) or None,
        "ceiling": human_ceiling(refs, tgt),
        "outputs": suspicious(hyps, srcs),
        "lengths": by_length(hyps, srcs, first, tgt),
    }


def check_comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise DataError that says what differs when two results of `evaluate` don't stand on the same ground."""
    differing = [name for name in ("sources", "references") if one["split"][name] != other["split"][name]]
    mine, theirs = (_without_resampling(result["scores"]["bleu"]["signature"]) for result in (one, other))
    if mine != theirs:
        differing.append(f"signatures ({mine} and {theirs})")
    if differing:
        raise DataError(f"these scores can't be compared: their {' and '.join(differing)} differ.")


def _without_resampling(signature: str) -> str:
    return "|".join(part for part in signature.split("|") if not part.startswith(("bs:", "seed:")))


def compare(systems: Mapping[str, Sequence[str]], refs: Refs, tgt: str, settings: EvalConfig) -> dict[str, Any]:
    """Paired bootstrap of several hypotheses of the same sources (Koehn 2004): each one against the first.

    `p` is the probability that a difference as large as the one seen comes from the choice of the sentences.
    """
    for name, hyps in systems.items():
        _check_counts(**{f"hypotheses of {name}": hyps, "references": refs})
    metrics = {name: _metric(name, tgt) for name in settings.metrics}
    named: Any = [(name, list(hyps)) for name, hyps in systems.items()]
    with _seed(settings.seed):
        signatures, columns = PairedTest(named, metrics, _columns(refs), test_type="bs", n_samples=settings.bootstrap)()
    scores: dict[str, Any] = {}
    for metric, signature in signatures.items():
        results: Sequence[Any] = columns[metric]
        rows = {
            name: {"value": float(r.score), "mean": float(r.mean), "interval": float(r.ci), "p": r.p_value}
            for name, r in zip(systems, results, strict=True)
        }
        scores[metric] = {"signature": str(signature), "systems": rows}
    return {"baseline": next(iter(systems)), "scores": scores}


# ── floor and ceiling ───────────────────────────────────────────────────────────────────────────────────────────────


def trigrams(text: str) -> set[str]:
    """The runs of three characters of a text; of a shorter one itself."""
    return {text[i : i + 3] for i in range(len(text) - 2)} or {text}


def floor_translations(train_src: Sequence[str], train_tgt: Sequence[str], srcs: Sequence[str]) -> list[str]:
    """What a lookup table says: the target of the training pair whose source is the most like each of `srcs`.

    Likeness is the Jaccard index of the trigrams; of equals the first pair wins. What a model scores above this it
    has learnt; what it scores below, copying would have given.
    """
    if not train_src:
        raise DataError("there is no training text to look translations up in.")
    wanted = [trigrams(text) for text in srcs]
    places = {gram: array("i") for grams in wanted for gram in grams}
    sizes = np.empty(len(train_src), dtype=np.int64)
    for place, text in enumerate(train_src):
        grams = trigrams(text)
        sizes[place] = len(grams)
        for gram in grams & places.keys():
            places[gram].append(place)
    index = {gram: np.frombuffer(found, dtype=np.intc) for gram, found in places.items() if found}
    none = np.zeros(0, dtype=np.intc)
    found = []
    for grams in wanted:
        hits = np.concatenate([none, *(index[gram] for gram in grams if gram in index)])
        shared = np.bincount(hits, minlength=len(train_src))
        found.append(train_tgt[int(np.argmax(shared / (sizes + len(grams) - shared)))])
    return found


def human_ceiling(refs: Refs, tgt: str) -> dict[str, Any] | None:
    """BLEU of the first reference against the others, where there are others; None when such lines are too few."""
    several = [row for row in refs if len(row) > 1]
    if len(several) < FEWEST_FOR_CEILING:
        return None
    human = bleu([row[0] for row in several], [row[1:] for row in several], tgt)
    return {"lines": len(several), "bleu": asdict(human)}


# ── what the outputs look like ──────────────────────────────────────────────────────────────────────────────────────

_AGAIN = re.compile(r"(.{1,40}?)\1{3,}", re.DOTALL)
_END = re.compile(r"[.!?。！？…][\"'”’»」』）)\]]*\s*$")


def is_repeated(text: str) -> bool:
    """Whether some stretch with a letter comes four times or more without a break, over at least eight characters."""
    return any(len(found[0]) >= 8 and any(map(str.isalnum, found[1])) for found in _AGAIN.finditer(text))


def suspicious(hyps: Sequence[str], srcs: Sequence[str]) -> dict[str, int]:
    """How many outputs are empty, repeat themselves, or stop without an end mark, where their source does not."""
    pairs = list(zip(hyps, srcs, strict=True))
    return {
        "empty": sum(not hyp.strip() and bool(src.strip()) for hyp, src in pairs),
        "repeated": sum(is_repeated(hyp) and not is_repeated(src) for hyp, src in pairs),
        "cut": sum(bool(hyp.strip() and _END.search(src) and not _END.search(hyp)) for hyp, src in pairs),
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


# ── for people ──────────────────────────────────────────────────────────────────────────────────────────────────────


def report_lines(result: Mapping[str, Any]) -> list[str]:
    """A result of `evaluate` as a table for the terminal: no score without its signature and its floor."""
    lines = []
    for title, scores in (("", result["scores"]), (", all references", result["scores_all_references"] or {})):
        for name, found in scores.items():
            text = f"{found['name']}{title}: {found['value']:.2f}"
            if found["interval"] is not None:
                text += f" ({found['mean']:.2f} ± {found['interval']:.2f})"
            if not title and result["floor"]:
                floor = result["floor"][name]["value"]
                text += f"   floor {floor:.2f}, {found['value'] - floor:+.2f}"
            lines += [text, f"  {found['signature']}"]
    ceiling = result["ceiling"]
    if ceiling:
        people = f"One reference against the others, on the {ceiling['lines']:,} lines that have several"
        lines += [f"{people}: BLEU {ceiling['bleu']['value']:.2f}", f"  {ceiling['bleu']['signature']}"]
    best, outputs = result["scores"]["bleu"], result["outputs"]
    lines.append(
        f"{result['lines']:,} lines; length {best['length_ratio']:.3f} of the references (brevity penalty "
        f"{best['brevity_penalty']:.3f}); outputs: {', '.join(f'{n:,} {kind}' for kind, n in outputs.items())}"
    )
    lines.append(f"{'source ' + result['lengths']['unit']:<18}{'lines':>8}{'BLEU':>8}{'length':>8}")
    for row in result["lengths"]["rows"]:
        span = f"{row['from']}-{row['to']}" if row["to"] else f"{row['from']}+"
        lines.append(f"{span:>17} {row['lines']:>8,}{row['bleu']:>8.2f}{row['length_ratio']:>8.3f}")
    return lines


def comparison_lines(found: Mapping[str, Any]) -> list[str]:
    """A result of `compare` as a table for the terminal."""
    lines = []
    for metric, table in found["scores"].items():
        width = max(map(len, table["systems"])) + 2
        lines.append(f"{metric}  {table['signature']}")
        for name, row in table["systems"].items():
            p = "baseline" if row["p"] is None else f"p = {row['p']:.4f}"
            lines.append(f"  {name:<{width}}{row['value']:>7.2f} ({row['mean']:.2f} ± {row['interval']:.2f})  {p}")
    return lines


# ── between here and sacreBLEU ──────────────────────────────────────────────────────────────────────────────────────


def _metric(name: str, tgt: str) -> Any:
    tokenizer = tokenize_for(tgt)
    if name == "bleu":
        return BLEU(tokenize=tokenizer)
    if name == "chrf":
        return CHRF()
    # Without these TER takes a line of Chinese for one word.
    return TER() if tokenizer == "13a" else TER(normalized=True, asian_support=True)


def _columns(refs: Refs) -> list[Any]:
    """sacreBLEU's way: a list of first references, one of second ones..., with None where a line has no more."""
    return [list(column) for column in zip_longest(*refs)] if refs else []


@contextmanager
def _seed(seed: int) -> Iterator[None]:
    """sacreBLEU takes the seed of its resampling from the environment alone."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before


def _check_counts(**texts: Sequence[Any]) -> None:
    counts = {name: len(lines) for name, lines in texts.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        raise DataError(f"{told}: they must match line by line.")
    if not all(counts.values()):
        raise DataError("there is nothing to score: the files are empty.")
    bare = next((number for number, row in enumerate(texts["references"], 1) if not row), None)
    if bare:
        raise DataError(f"line {bare} has no reference.")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()


def _plain(scores: Mapping[str, Score]) -> dict[str, Any]:
    return {name: asdict(found) for name, found in scores.items()}
