"""eval: how good a translation is, by sacreBLEU on raw text, and between which floor and ceiling that number stands.

The only importer of sacrebleu. `refs` always has a list for each line: its references, one or more, the first of them
the one that the score against one reference uses.
"""

import hashlib
import json
import logging
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from nmt.config import EvalConfig
from nmt.errors import ConfigError, DataError, counted
from nmt.evaluation.outputs import suspicious
from nmt.evaluation.resampling import FEWEST, ScoreOf, Stats, bootstrap, interval, p_value
from nmt.languages import knows_words, name_of, parse

log = logging.getLogger(__name__)

Refs = Sequence[Sequence[str]]

MECAB = {"ja": "ja-mecab", "ko": "ko-mecab"}
"""sacreBLEU's own tokenisers for these, which need a dictionary that isn't installed with it."""

UNSPACED = {"CJK": "zh", "HIRAGANA": "ja", "KATAKANA": "ja", "THAI": "th", "LAO": "lo", "KHMER": "km", "MYANMAR": "my",
            "TIBETAN": "bo"}  # fmt: skip
"""Scripts without spaces between words, by the first word of their characters' names; a language that has each."""

LOWER_IS_BETTER = {"ter"}

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
    no_interval: str | None = None
    """Why an interval that was asked for is missing."""
    brevity_penalty: float | None = None
    """BLEU alone has it."""
    length_ratio: float | None = None
    """Tokens of the hypotheses for each of the references; BLEU alone has it."""


# ── which tokeniser ─────────────────────────────────────────────────────────────────────────────────────────────────


def tokenize_for(tgt: str) -> str:
    """sacreBLEU's tokeniser for a target language; 13a would take a Chinese sentence for one word.

    `char` where words have no spaces between them, and for Korean, whose words are whole phrases. sacreBLEU prefers
    MeCab for Japanese and Korean: scores by another tokeniser can't be compared, and the signature says which it was.
    Raises ConfigError for what is no language code.
    """
    language = parse(tgt)
    if language.script in ("Latn", "Cyrl"):  # Pinyin, for example.
        return "13a"
    if language.is_chinese:
        return "zh"
    return "char" if language.is_unspaced or language.primary == "ko" else "13a"


def check_tokenizer(texts: Iterable[str], tgt: str, what: str = "the references") -> None:
    """Raise DataError where the tokeniser for `tgt` doesn't fit the script that the texts are written in.

    Then BLEU would be about 0 of a good translation, a sentence being a word, or much too high, a letter being one.
    """
    scripts, tokenizer = _scripts(texts), tokenize_for(tgt)
    letters = scripts.total()
    if tokenizer == "char":
        wrong, how = scripts, "would split into letters"
        fits = 4 * sum(scripts[script] for script in (*UNSPACED, "HANGUL")) >= letters
    else:
        split = {"CJK"} if tokenizer == "zh" else set()
        wrong, how = Counter({script: scripts[script] for script in UNSPACED.keys() - split}), "takes for one word"
        fits = 5 * wrong.total() <= letters  # Such a character is a word or a syllable, so few of them are much text.
    if fits:
        return
    script = max(wrong, key=wrong.__getitem__)
    meant = "ja" if 10 * (scripts["HIRAGANA"] + scripts["KATAKANA"]) > letters else UNSPACED.get(script, "")
    raise DataError(
        f"{what} are written in {'Han' if script == 'CJK' else script.title()} characters, which BLEU for {tgt} "
        f"(tokeniser {tokenizer}) {how}; give the code of the language that they are in"
        + (f", e.g. {meant}." if meant else ".")
    )


def _scripts(texts: Iterable[str]) -> Counter[str]:
    """How many letters the texts have of each script."""
    found: Counter[str] = Counter()
    for character, count in Counter(chain.from_iterable(texts)).items():
        if character.isalpha():
            found[unicodedata.name(character, "OTHER").split(maxsplit=1)[0]] += count
    return found


# ── scores ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def bleu(hyps: Sequence[str], refs: Refs, tgt: str) -> Score:
    """BLEU alone, without an interval, whatever script the text is in."""
    return _scores(hyps, refs, tgt, EvalConfig(metrics=("bleu",), bootstrap=0))["bleu"]


def score(hyps: Sequence[str], refs: Refs, tgt: str, settings: EvalConfig) -> dict[str, Score]:
    """Each wanted metric of the hypotheses against all their references."""
    _check_texts(tgt, hypotheses=hyps, references=refs)
    return _scores(hyps, refs, tgt, settings)


def _scores(hyps: Sequence[str], refs: Refs, tgt: str, settings: EvalConfig) -> dict[str, Score]:
    _check_counts(hypotheses=hyps, references=refs)
    found = {}
    for name in settings.metrics:
        metric = _Metric(name, tgt)
        stats = metric.stats(hyps, refs)
        result = metric.result(stats.sum(0))
        found[name] = Score(
            name=result.name,
            value=float(result.score),
            signature=metric.signature(settings),
            **_interval(stats, metric.score, settings),
            brevity_penalty=getattr(result, "bp", None),
            length_ratio=getattr(result, "ratio", None),
        )
    return found


def _interval(stats: Stats, score: ScoreOf, settings: EvalConfig) -> dict[str, Any]:
    """Mean and interval of a score, or why there is none."""
    none: dict[str, Any] = {"mean": None, "interval": None, "no_interval": None}
    if not settings.bootstrap:
        return none
    if settings.bootstrap < FEWEST:
        return none | {"no_interval": f"a 95 % interval needs an eval.bootstrap of at least {FEWEST}"}
    if len(stats) < 2:
        return none | {"no_interval": "one line alone says nothing of others"}
    scores = bootstrap(stats, score, settings.bootstrap, settings.seed)
    if not np.isfinite(scores).all():
        return none | {"no_interval": f"{(~np.isfinite(scores)).sum():,} resamplings have no score"}
    mean, half = interval(scores)
    return none | {"mean": mean, "interval": half}


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
    _check_texts(tgt, hypotheses=hyps, references=refs)
    first = [row[:1] for row in refs]
    several = any(len(row) > 1 for row in refs)
    floor = _scores(baseline_translations(*train, srcs), first, tgt, replace(settings, bootstrap=0)) if train else {}
    return {
        "lines": len(hyps),
        "split": {"sources": _digest(srcs), "references": _digest(refs)},
        "scores": _plain(_scores(hyps, first, tgt, settings)),
        "scores_all_references": _plain(_scores(hyps, refs, tgt, settings)) if several else None,
        "floor": _plain(floor) or None,
        "ceiling": human_score(refs, tgt),
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
    """Several hypotheses of the same sources: the scores of each, and a paired test of each against the first.

    `p` is how probable a difference as large as the one seen is between systems that are equally good.
    """
    _check_texts(tgt, **{f"hypotheses of {name}": hyps for name, hyps in systems.items()}, references=refs)
    scores: dict[str, Any] = {}
    for metric_name in settings.metrics:
        metric = _Metric(metric_name, tgt)
        stats = {name: metric.stats(hyps, refs) for name, hyps in systems.items()}
        first, *others = stats
        p = {name: p_value(stats[first], stats[name], metric.score, settings.bootstrap, settings.seed)
             for name in others if settings.bootstrap}  # fmt: skip
        rows = {
            name: {"value": metric.score(found.sum(0)), **_interval(found, metric.score, settings), "p": p.get(name)}
            for name, found in stats.items()
        }
        title = metric.result(stats[first].sum(0)).name
        scores[title] = {"signature": metric.signature(settings, paired=True), "systems": rows}
    return {"baseline": next(iter(systems)), "scores": scores}


# ── floor and ceiling ───────────────────────────────────────────────────────────────────────────────────────────────


def trigrams(text: str) -> set[str]:
    """The runs of three characters of a text; of a shorter one itself."""
    return {text[i : i + 3] for i in range(len(text) - 2)} or {text}


def baseline_translations(train_src: Sequence[str], train_tgt: Sequence[str], srcs: Sequence[str]) -> list[str]:
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


def human_score(refs: Refs, tgt: str) -> dict[str, Any] | None:
    """BLEU of the first reference against the others, where there are others; None when such lines are too few."""
    several = [row for row in refs if len(row) > 1]
    if len(several) < FEWEST_FOR_CEILING:
        return None
    human = bleu([row[0] for row in several], [row[1:] for row in several], tgt)
    return {"lines": len(several), "bleu": asdict(human)}


# ── what the outputs look like ──────────────────────────────────────────────────────────────────────────────────────


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
    lines = [
        *score_lines(result["scores"], floor=result["floor"]),
        *score_lines(result["scores_all_references"] or {}, ", all references"),
    ]
    ceiling = result["ceiling"]
    if ceiling:
        people = f"One reference against the others, on {counted(ceiling['lines'], 'line')} with several"
        lines += [f"{people}: BLEU {ceiling['bleu']['value']:.2f}", f"  {ceiling['bleu']['signature']}"]
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


def score_lines(scores: Mapping[str, Any], title: str = "", floor: Mapping[str, Any] | None = None) -> list[str]:
    """Scores as two lines each: the number with its interval and floor, and its signature."""
    lines = []
    for name, found in scores.items():
        text = f"{found['name']}{title}: {found['value']:.2f}{_uncertainty(found)}"
        if floor:
            text += "   " + baseline_text(name, found["value"], floor[name]["value"])
        lines += [text, f"  {found['signature']}"]
    return lines


def baseline_text(metric: str, value: float, floor: float) -> str:
    """The floor, and how far above it a score is; of a metric of which less is better, by how much it is better."""
    if not better_if(metric):
        return f"floor {floor:.2f}, {value - floor:+.2f}"
    side = "better" if value <= floor else "worse"
    return f"floor {floor:.2f}, {abs(value - floor):.2f} {side}{better_if(metric)}"


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


# ── between here and sacreBLEU ──────────────────────────────────────────────────────────────────────────────────────


class _Metric:
    """A metric of sacreBLEU for one target language, as statistics of each sentence and scores of their sums."""

    def __init__(self, name: str, tgt: str) -> None:
        tokenizer = tokenize_for(tgt)
        if name == "bleu":
            self.metric: Any = BLEU(tokenize=tokenizer, force=True)  # _check_texts looks for tokenised text.
        elif name == "chrf":
            self.metric = CHRF()
        elif tokenizer == "13a":
            self.metric = TER()
        elif knows_words(tgt):
            self.metric = TER(normalized=True, asian_support=True)  # Else TER takes a line of Chinese for one word.
        else:
            raise ConfigError(f"TER knows no words of {name_of(tgt)}; leave ter out of eval.metrics.")

    def stats(self, hyps: Sequence[str], refs: Refs) -> Stats:
        columns = [list(column) for column in zip_longest(*refs)]  # None where a line has no more references.
        return np.array(self.metric._extract_corpus_statistics(list(hyps), columns), dtype=np.float64)

    def result(self, total: Stats) -> Any:
        # Whole numbers as Python has them, so that the score has the bits that sacreBLEU gives it.
        return self.metric._compute_score_from_stats([int(n) if n == int(n) else n for n in total.tolist()])

    def score(self, total: Stats) -> float:
        return float(self.result(total).score)

    def signature(self, settings: EvalConfig, paired: bool = False) -> str:
        """sacreBLEU's signature, with the resampling where there is one; after `stats`, which count the references."""
        signature = self.metric.get_signature()
        if settings.bootstrap:
            signature.update("ar", settings.bootstrap if paired else None)
            signature.update("bs", settings.bootstrap if settings.bootstrap >= FEWEST else None)
            signature.update("seed", settings.seed)
        return str(signature)


def _check_texts(tgt: str, **texts: Sequence[Any]) -> None:
    """Refuse what can't be scored; say once what makes a score less than it seems."""
    _check_counts(**texts)
    check_tokenizer(chain.from_iterable(texts["references"]), tgt)
    language = parse(tgt).primary
    if tokenize_for(tgt) == "char" and language in MECAB:
        log.warning(
            "eval: BLEU of %s is by characters here (tok:char); it can't be compared with scores by sacreBLEU's %s",
            name_of(tgt), MECAB[language],
        )  # fmt: skip
    for name, lines in texts.items():
        first = (row[0] for row in lines) if name == "references" else lines
        spaced = sum(line.endswith((" .", " 。")) for line in first)
        if 10 * spaced > len(lines):
            log.warning(
                "eval: %s of the %s %s end in a full stop with a space before it, as tokenised text does; scores are "
                "comparable on detokenised text only", f"{spaced:,}", f"{len(lines):,}", name,
            )  # fmt: skip


def _check_counts(**texts: Sequence[Any]) -> None:
    # A text is a sequence of texts to Python, each of one character.
    if any(isinstance(lines, str) for lines in (*texts.values(), *texts["references"])):
        raise TypeError("hypotheses and sources are lists of lines, references a list of lists: [['one', 'two'], ...]")
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
