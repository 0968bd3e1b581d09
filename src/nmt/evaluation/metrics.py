"""eval: BLEU, chrF and TER by sacreBLEU on raw text, with confidence intervals and comparison of systems.

The only importer of sacrebleu. `refs` always has a list for each line: its references, one or more, the first of them
the one that the score against one reference uses.
"""

import hashlib
import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from nmt.config import EvalConfig
from nmt.errors import ConfigError, DataError
from nmt.evaluation.resampling import FEWEST, ScoreOf, Stats, bootstrap, interval, p_value
from nmt.languages import knows_words, name_of, parse

log = logging.getLogger(__name__)

Refs = Sequence[Sequence[str]]

MECAB = {"ja": "ja-mecab", "ko": "ko-mecab"}
"""sacreBLEU's own tokenisers for these, which need a dictionary that isn't installed with it."""

UNSPACED = {"CJK": "zh", "HIRAGANA": "ja", "KATAKANA": "ja", "THAI": "th", "LAO": "lo", "KHMER": "km", "MYANMAR": "my",
            "TIBETAN": "bo"}  # fmt: skip
"""Scripts without spaces between words, by the first word of their characters' names; a language that has each."""


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


# ── which tokeniser ───────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── scores ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bleu(hyps: Sequence[str], refs: Refs, tgt: str) -> Score:
    """BLEU alone, without an interval, whatever script the text is in."""
    return score_all(hyps, refs, tgt, EvalConfig(metrics=("bleu",), bootstrap=0))["bleu"]


def score(hyps: Sequence[str], refs: Refs, tgt: str, settings: EvalConfig) -> dict[str, Score]:
    """Each wanted metric of the hypotheses against all their references."""
    check_texts(tgt, hypotheses=hyps, references=refs)
    return score_all(hyps, refs, tgt, settings)


def score_all(hyps: Sequence[str], refs: Refs, tgt: str, settings: EvalConfig) -> dict[str, Score]:
    check_counts(hypotheses=hyps, references=refs)
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
    check_texts(tgt, **{f"hypotheses of {name}": hyps for name, hyps in systems.items()}, references=refs)
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


# ── between here and sacreBLEU ────────────────────────────────────────────────────────────────────────────────────────


class _Metric:
    """A metric of sacreBLEU for one target language, as statistics of each sentence and scores of their sums."""

    def __init__(self, name: str, tgt: str) -> None:
        tokenizer = tokenize_for(tgt)
        if name == "bleu":
            self.metric: Any = BLEU(tokenize=tokenizer, force=True)  # check_texts looks for tokenised text.
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


def check_texts(tgt: str, **texts: Sequence[Any]) -> None:
    """Refuse what can't be scored; say once what makes a score less than it seems."""
    check_counts(**texts)
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


def check_counts(**texts: Sequence[Any]) -> None:
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


def content_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()


def as_plain(scores: Mapping[str, Score]) -> dict[str, Any]:
    return {name: asdict(found) for name, found in scores.items()}
