"""Every setting of nmt, in pipeline order, each with its unit and a sentence, and the rules that it must keep.

A setting is of one of three kinds. A *result* setting changes what is computed or chosen, so it is in the fingerprint
of its stage; every setting is one unless it says otherwise. *Numerics* change rounding and dropout masks alone: the
same pairs, the same formulas. *Runtime* settings leave every byte of the result as it is.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from nmt.errors import ConfigError, counted
from nmt.languages import knows_words, parse

LONGEST_NAME = 200
"""Bytes of a name that becomes a folder; file systems take 255, and what is being written there has a longer one."""


Kind = Literal["result", "numerics", "runtime"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]

NUMERICS: Kind = "numerics"
"""Marks a setting that changes rounding and dropout masks alone; a run records it and may be resumed with another."""
RUNTIME: Kind = "runtime"
"""Marks a setting that leaves every byte of the result as it is."""


def _check(*rules: tuple[bool, str]) -> None:
    """Raise ConfigError with the text of every rule that does not hold."""
    problems = [text for holds, text in rules if not holds]
    if problems:
        raise ConfigError(*problems)


def name_rule(what: str, name: str) -> tuple[bool, str]:
    """Whether a name can be that of a folder, here and wherever it is copied to, and what to say if it can't.

    The one rule for every name that becomes a path: of a corpus, a source, a run. A name is never a path itself.
    """
    faults = (
        (not name, "it is empty"),
        (re.search(r'[/\\:*?"<>|]', name) is not None, 'it has one of / \\ : * ? " < > |'),
        (NOT_A_NAME.search(name) is not None, "it has a control character, or one that is no text"),
        (name[:1] in (".", " ") or name[-1:] in (".", " "), "it begins or ends with a dot or a space"),
        (re.search(r"\w", name) is None, "it has no letter and no digit"),
        (_DEVICE.fullmatch(name) is not None, "Windows means a device by it"),
        (len(name.encode(errors="replace")) > LONGEST_NAME, f"it has over {LONGEST_NAME} bytes"),
    )
    found = [fault for holds, fault in faults if holds]
    return not found, (
        f"{what} is {name!r}; give a folder name: letters, digits, '.', '_' or '-' "
        f"({found[0] if found else 'as it does'})."
    )


def check_name(what: str, name: str) -> None:
    """Raises ConfigError for a name that can't be that of a folder."""
    _check(name_rule(what, name))


# No file, folder or language has these in its name; YAML can spell them ("\0").
NOT_A_NAME = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)


def _pair_rule(what: str, files: Sequence[str]) -> tuple[bool, str]:
    """Two files belong together line by line, which two tab-separated ones don't."""
    two_tables = len(files) == 2 and all(file.lower().endswith(".tsv") for file in files)
    return not two_tables, (
        f"{what} names two tab-separated files, {' and '.join(files)}; of two files each has one language. "
        "Put them into one (cat), or give one of them."
    )


def _language_rules(name: str, codes: Sequence[str]) -> list[tuple[bool, str]]:
    """A language chooses rules and tokenisers and is the ending of files, so it can't be just any text."""
    refusals = []
    for code in codes:
        try:
            parse(code)
        except ConfigError as error:
            refusals.append((False, f"{name}: {error}"))
    return refusals


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which corpus, and in which direction it is translated."""

    corpus: str = "cmn"
    """Name of the corpus; its raw files lie in `data/NAME/raw/` and everything made of them beside that."""
    src: str = "en"
    """Language that is translated from."""
    tgt: str = "zh"
    """Language that is translated into; it also chooses the BLEU tokeniser."""

    def __post_init__(self) -> None:
        _check(
            (self.src != self.tgt, f"data.tgt is {self.tgt!r}, the same as data.src; give two languages."),
            name_rule("data.corpus", self.corpus),
            *_language_rules("data.src", [self.src]),
            *_language_rules("data.tgt", [self.tgt]),
        )


def _keeps_line_ends(encoding: str) -> bool:
    try:
        b"\xff".decode(encoding, "replace")  # Some can't read on after a byte that is wrong.
        return "\n\t".encode(encoding) == b"\n\t"
    except (LookupError, ValueError):
        return False


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """From raw files to clean, split text."""

    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """NAME: FILE (tab-separated) or NAME: [FILE, FILE] (line-aligned); none means every file in `data/CORPUS/raw/`."""
    columns: tuple[str, ...] = ("en", "zh")
    """Languages of the columns of a tab-separated file, and of the two files of a pair, left to right."""
    encoding: str = "utf-8"
    """Character encoding of the raw files."""
    dev: tuple[str, ...] = ()
    """The dev set as files (one tab-separated, or two line-aligned in the order of `columns`); none makes it here."""
    test: tuple[str, ...] = ()
    """The test set as files, likewise; dev and test are given together."""
    dev_size: int = 1000
    """Pairs of the dev set when it is made here; at most a tenth of the groups of pairs that share a side."""
    test_size: int = 1000
    """Pairs of the test set when it is made here, likewise."""
    seed: int = 1
    """Salt of the hash that orders the groups for the split."""
    zh_script: Literal["auto", "simplified", "traditional", "keep", "filter"] = "auto"
    """Convert Chinese to the script of its code (`auto`) or another, keep it, or drop Traditional lines (`filter`)."""
    max_words: int = 200
    """Longest side in words, for a side that is written with spaces."""
    max_units: int = 300
    """Longest side in Han characters plus runs of letters or digits, for a side written in Han characters."""
    min_ratio: float = 0.2
    """Fewest words for each unit of the Han side, when either side is longer than three."""
    max_ratio: float = 2.0
    """Most words for each unit of the Han side, likewise."""
    max_byte_ratio: float = 3.0
    """Most UTF-8 bytes of the longer side for one of the shorter, when either side is longer than three."""
    min_han_share: float = 0.3
    """Least share of Han characters among the letters of the Han side."""
    max_han_share: float = 0.1
    """Largest share of Han characters among the letters of the other side."""
    drop_damaged: bool = True
    """Drop pairs with a control or replacement character that shows a wrong encoding lost something."""
    drop_copies: bool = True
    """Drop pairs whose sides are equal but for case and punctuation; they teach a model to echo."""
    drop_markup: bool = True
    """Drop pairs whose tags, formulas or printf placeholders differ, or that have an entity HTML doesn't know."""
    drop_pinyin: bool = True
    """Drop pairs whose Han side also has its pronunciation in Latin letters with tone marks."""
    drop_kana: bool = True
    """Drop pairs whose Chinese side is Japanese or Korean: more than one kana or hangul, and a tenth of its letters."""
    drop_cantonese: bool = False
    """Drop Chinese lines with at least two Cantonese-only characters."""
    drop_numbers: bool = False
    """Drop pairs whose long or decimal numbers all disagree; off, since good pairs often write them differently."""

    def __post_init__(self) -> None:
        _check(
            (
                len(self.columns) == 2 and self.columns[0] != self.columns[1],
                f"clean.columns is {list(self.columns)}; give two languages, e.g. [en, zh].",
            ),
            *_language_rules("clean.columns", self.columns),
            (self.seed >= 0, f"clean.seed is {self.seed}; give 0 or more."),
            (
                all(1 <= len(files) <= 2 for files in self.sources.values()),
                "clean.sources: a source is one tab-separated file or two line-aligned files.",
            ),
            *(name_rule("a name in clean.sources", name) for name in self.sources),
            *(_pair_rule(f"clean.sources: {name}", files) for name, files in self.sources.items()),
            _pair_rule("clean.dev", self.dev),
            _pair_rule("clean.test", self.test),
            (
                bool(self.dev) == bool(self.test),
                "clean.dev and clean.test: give both as files, or neither and let clean split.",
            ),
            (len(self.dev) <= 2 and len(self.test) <= 2, "clean.dev and clean.test: give one or two files each."),
            (
                _keeps_line_ends(self.encoding),
                f"clean.encoding is {self.encoding!r}; give one that Python knows and in which a line feed is one "
                "byte, e.g. utf-8, gb18030 or big5; convert files in others (iconv).",
            ),
            *(
                (getattr(self, name) >= 1, f"clean.{name} is {getattr(self, name)}; give at least 1.")
                for name in ("dev_size", "test_size", "max_words", "max_units", "max_byte_ratio")
            ),
            (
                0 <= self.min_ratio < self.max_ratio,
                f"clean.min_ratio is {self.min_ratio} and clean.max_ratio {self.max_ratio}; "
                "give 0 <= min_ratio < max_ratio.",
            ),
            *(
                (0 <= getattr(self, name) <= 1, f"clean.{name} is {getattr(self, name)}; give a share from 0 to 1.")
                for name in ("min_han_share", "max_han_share")
            ),
        )


@dataclass(frozen=True, kw_only=True)
class BpeConfig:
    """The subword vocabulary."""

    vocab_size: int = 8000
    """Pieces, the special ones and the 256 byte pieces counted."""
    character_coverage: float = 0.9995
    """Share of the characters of the text that get a piece of their own; the rest is written in bytes."""
    dropout: float = 0.0
    """Probability that a merge is skipped when training text is encoded (BPE-dropout, Provilkov et al. 2020)."""
    user_symbols: tuple[str, ...] = ("<mask/>",)
    """Pieces that are never split."""
    shared_vocab: bool = True
    """One vocabulary over both languages, so that all embeddings are one matrix; else one for each."""
    model: tuple[str, ...] = ()
    """Existing SentencePiece model instead of a new one (two, in the order of clean.columns, unless shared_vocab)."""

    def __post_init__(self) -> None:
        _check(
            (
                self.vocab_size >= 269 + len(self.user_symbols),
                f"bpe.vocab_size is {self.vocab_size}; give at least {269 + len(self.user_symbols)} (256 are byte "
                f"pieces, 4 special, {len(self.user_symbols)} bpe.user_symbols).",
            ),
            (
                0.9 <= self.character_coverage <= 1,
                f"bpe.character_coverage is {self.character_coverage}; give a share from 0.9 to 1.",
            ),
            (0 <= self.dropout < 1, f"bpe.dropout is {self.dropout}; give a probability below 1."),
            *(
                (
                    re.fullmatch(r"[^\s\u2581]+", symbol) is not None
                    and re.fullmatch(r"<(pad|unk|/?s|0x[0-9A-F]{2})>", symbol) is None
                    and self.user_symbols.count(symbol) == 1,
                    f"bpe.user_symbols has {symbol!r}; give different symbols without spaces, none of them special.",
                )
                for symbol in dict.fromkeys(self.user_symbols)
            ),
            (
                len(self.model) in ((0, 1) if self.shared_vocab else (0, 2)),
                f"bpe.model names {counted(len(self.model), 'file')}; "
                f"give {'one' if self.shared_vocab else 'two'} or none.",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """From text to token ids."""

    max_tokens: int = 512
    """Longest side in tokens, eos counted; longer pairs are dropped and counted, never cut."""

    def __post_init__(self) -> None:
        _check((self.max_tokens >= 2, f"encode.max_tokens is {self.max_tokens}; give at least 2."))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The Transformer; the defaults are the base model of Vaswani et al. 2017."""

    layers: int = 6
    """Encoder layers."""
    decoder_layers: int = 0
    """Decoder layers; 0 means as many as the encoder has."""
    d_model: int = 512
    """Width of embeddings and layers."""
    d_ff: int = 2048
    """Inner width of the feed-forward blocks."""
    heads: int = 8
    """Attention heads."""
    kv_heads: int = 0
    """Heads that keys and values have, each shared by heads / kv_heads queries; 0 means one for each head."""
    norm_order: Literal["post", "pre"] = "post"
    """Normalise after each residual sum (the paper), or before each block and once at the end of the stack."""
    norm_type: Literal["layer", "rms"] = "layer"
    """LayerNorm (the paper), or RMSNorm (Zhang and Sennrich 2019)."""
    norm_eps: float = 1e-5
    """Added to the variance inside the norm."""
    activation: Literal["relu", "gelu", "swiglu"] = "relu"
    """Inside the feed-forward block; swiglu (Shazeer 2020) has a third matrix."""
    position: Literal["sinusoidal", "learned", "rope"] = "sinusoidal"
    """Sinusoids added to the embeddings (the paper), learned vectors, or rotated queries and keys (Su et al. 2021)."""
    max_positions: int = 1024
    """Positions that `learned` has vectors for; the other two know no limit."""
    dropout: float = 0.1
    """On the output of each block and on the sum of embedding and position."""
    attention_dropout: float = 0.0
    """On the attention weights."""
    activation_dropout: float = 0.0
    """On the inner activations of the feed-forward block."""

    def __post_init__(self) -> None:
        kv_heads = self.kv_heads or self.heads
        even_multiple = math.lcm(max(self.heads, 1), 2)
        positive = ("layers", "d_model", "d_ff", "heads", "max_positions")
        _check(
            *(
                (getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}; give at least 1.")
                for name in positive
            ),
            *(
                (getattr(self, name) >= 0, f"model.{name} is {getattr(self, name)}; give 0 or more.")
                for name in ("decoder_layers", "kv_heads")
            ),
            *(
                (0 <= getattr(self, name) < 1, f"model.{name} is {getattr(self, name)}; give a probability below 1.")
                for name in ("dropout", "attention_dropout", "activation_dropout")
            ),
            (self.norm_eps > 0, f"model.norm_eps is {self.norm_eps}; give a positive number, e.g. 1e-5."),
            (
                self.heads < 1 or self.d_model % self.heads == 0,
                f"model.d_model is {self.d_model}, not a multiple of model.heads ({self.heads}); "
                f"{even_multiple * max(1, round(self.d_model / even_multiple))} would work.",
            ),
            (self.d_model % 2 == 0, f"model.d_model is {self.d_model}; give an even number (sine and cosine)."),
            (
                kv_heads < 1 or self.heads % kv_heads == 0,
                f"model.kv_heads is {self.kv_heads}; it must divide model.heads ({self.heads}); "
                f"{math.gcd(self.heads, kv_heads)} would work.",
            ),
            (
                self.position != "rope" or self.heads < 1 or (self.d_model // self.heads) % 2 == 0,
                f"model.position: rope needs an even width of each head; give a model.d_model that {2 * self.heads} "
                "(2 x model.heads) divides.",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    optimizer: Literal["adam", "adamw"] = "adam"
    """Adam (the paper), or AdamW with `weight_decay` on matrices."""
    beta1: float = 0.9
    """Decay of Adam's mean of gradients."""
    beta2: float = 0.98
    """Decay of Adam's mean of squared gradients."""
    eps: float = 1e-9
    """Added to the root of Adam's second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    clip_norm: float = 1.0
    """Largest L2 norm of the gradient of one update; 0 leaves it alone. The paper states no clipping."""
    schedule: Literal["noam", "inverse_sqrt", "cosine", "constant"] = "noam"
    """Learning-rate schedule; each begins with a linear warm-up over `warmup_steps`."""
    learning_rate: float = 1e-3
    """Peak of inverse_sqrt, cosine and constant; noam works its peak out from d_model and warmup_steps."""
    lr_factor: float = 1.0
    """Factor on the learning rate, whatever the schedule."""
    warmup_steps: int = 4000
    """Steps until the learning rate is at its peak."""

    def __post_init__(self) -> None:
        _check(
            (self.warmup_steps >= 1, f"optim.warmup_steps is {self.warmup_steps}; give at least 1."),
            *(
                (getattr(self, name) >= 0, f"optim.{name} is {getattr(self, name)}; give 0 or more.")
                for name in ("clip_norm", "weight_decay")
            ),
            *(
                (getattr(self, name) > 0, f"optim.{name} is {getattr(self, name)}; give a positive number.")
                for name in ("eps", "learning_rate", "lr_factor")
            ),
            *(
                (
                    0 <= getattr(self, name) < 1,
                    f"optim.{name} is {getattr(self, name)}; give a number from 0 to below 1.",
                )
                for name in ("beta1", "beta2")
            ),
            (
                self.optimizer == "adamw" or self.weight_decay == 0,
                "optim.weight_decay is used by adamw only; set optim.optimizer to adamw.",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What else decides the result of a training: its updates, the loss, validation and which checkpoints are kept."""

    batch_tokens: int = 25_000
    """Non-padding tokens on either side of one update, over all processes (Vaswani et al. 2017, section 5.1)."""
    length_buckets: int = 0
    """Groups of sentence lengths of which an update has equally many tokens; 0: one for 256 batch_tokens, up to 8."""
    label_smoothing: float = 0.1
    """Share of the target distribution that is spread evenly over the vocabulary."""
    max_steps: int = 100_000
    """Steps (updates of the weights) of the training."""
    seed: int = 1
    """Seed of the weights, the order of the data and dropout."""
    precision: Precision = "auto"
    """Of the forward pass's products; weights, loss and optimizer are float32 always. `auto` becomes bfloat16 on a GPU
    that multiplies it, else float32, when a training begins; the run keeps what it became."""
    validate_every: int = 1000
    """Steps between two validations."""
    validate_sentences: int = 200
    """First sentences of the dev set that are translated (greedily) at a validation; 0 translates none."""
    early_stop_metric: Literal["bleu", "loss"] = "bleu"
    """The score of the dev set that early stopping and the best checkpoint go by; bleu is that of greedy search."""
    early_stop_patience: int = 0
    """Stop after so many validations without a better score; 0 never stops early."""
    save_every: int = 1000
    """Steps between two checkpoints."""
    keep_checkpoints: int = 5
    """Newest checkpoints that are kept, beside the best; the training ends by averaging them."""

    def __post_init__(self) -> None:
        _check(
            *(
                (getattr(self, name) >= 1, f"train.{name} is {getattr(self, name)}; give at least 1.")
                for name in ("batch_tokens", "max_steps", "validate_every", "save_every", "keep_checkpoints")
            ),
            *(
                (getattr(self, name) >= 0, f"train.{name} is {getattr(self, name)}; give 0 or more.")
                for name in ("length_buckets", "seed", "validate_sentences", "early_stop_patience")
            ),
            (
                self.length_buckets <= self.batch_tokens,
                f"train.length_buckets is {self.length_buckets}, more than train.batch_tokens ({self.batch_tokens}); "
                "give at most so many, or 0.",
            ),
            (
                0 <= self.label_smoothing < 1,
                f"train.label_smoothing is {self.label_smoothing}; give a number from 0 to below 1.",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How a training is run: its numerics, and what leaves every byte of the result as it is."""

    device_tokens: Annotated[int | Literal["auto"], NUMERICS] = "auto"
    """Tokens, padding included, that one forward pass on one device may hold on either side. `auto`: on a GPU the most
    that fit, up to the whole share that a process has of an update; elsewhere 4,096."""
    compile: Annotated[bool, NUMERICS] = False
    """Compile the model with torch.compile."""
    log_every: Annotated[int, RUNTIME] = 50
    """Steps between two lines of the log."""
    save_minutes: Annotated[int, RUNTIME] = 30
    """Minutes without a checkpoint after which one is saved to resume from, which is never averaged; 0 saves none."""
    collective_timeout: Annotated[float, RUNTIME] = 600.0
    """Seconds that a process waits for the others, at the beginning and in each exchange, before it gives up."""
    heartbeat_timeout: Annotated[float, RUNTIME] = 60.0
    """Seconds without a sign of progress after which the other processes name one that no longer responds."""

    def __post_init__(self) -> None:
        _check(
            (
                self.device_tokens == "auto" or self.device_tokens >= 1,
                f"runtime.device_tokens is {self.device_tokens}; give at least 1, or auto.",
            ),
            *(
                (getattr(self, name) >= 1, f"runtime.{name} is {getattr(self, name)}; give at least 1.")
                for name in ("log_every", "collective_timeout", "heartbeat_timeout")
            ),
            (self.save_minutes >= 0, f"runtime.save_minutes is {self.save_minutes}; give 0 or more."),
        )


@dataclass(frozen=True, kw_only=True)
class TranslateConfig:
    """How a translation is searched for."""

    beam: int = 4
    """Hypotheses kept in the search; 1 is greedy, whatever alpha and beam_patience are."""
    alpha: float = 0.6
    """Strength of the length penalty; 0 prefers short translations."""
    length_penalty: Literal["gnmt", "power"] = "gnmt"
    """((5+n)/6)^alpha (Wu et al. 2016, equation 14), or n^alpha, as fairseq and CTranslate2 have it."""
    beam_patience: float = 0.0
    """A sentence is done when beam times this many have finished (Kasai 2022; 1: as fairseq), 0: when none can win."""
    max_length_offset: int = 50
    """A translation has at most so many tokens more than its source (Vaswani et al. 2017, section 6.1)."""
    batch_tokens: Annotated[int | Literal["auto"], NUMERICS] = "auto"
    """Source tokens times beam, padding included, that are decoded together. `auto`: on a GPU by its memory (65,536 for
    base with 80 GB), elsewhere 4,096."""
    max_source_tokens: int = 512
    """Tokens of the longest input that is translated whole; a longer one is split at its sentence ends."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of a finished model's weights and products in translation; while training, the dev set's is float32. The same on
    every device, so that a score does not depend on where it was computed."""

    def __post_init__(self) -> None:
        _check(
            *(
                (getattr(self, name) >= 1, f"translate.{name} is {getattr(self, name)}; give at least 1.")
                for name in ("beam", "batch_tokens")
                if getattr(self, name) != "auto"
            ),
            *(
                (getattr(self, name) >= 0, f"translate.{name} is {getattr(self, name)}; give 0 or more.")
                for name in ("alpha", "beam_patience", "max_length_offset")
            ),
            # Beyond this n^alpha is no number any more, and no translation of a sentence is so long.
            (self.alpha <= 10, f"translate.alpha is {self.alpha}; give at most 10."),
            (
                self.max_length_offset <= 10_000,
                f"translate.max_length_offset is {self.max_length_offset}; give at most 10,000.",
            ),
            (self.max_source_tokens >= 2, f"translate.max_source_tokens is {self.max_source_tokens}; give at least 2."),
        )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How a translation is scored."""

    metrics: tuple[str, ...] = ("bleu", "chrf")
    """Scores by sacreBLEU: bleu, chrf, ter."""
    bootstrap: int = 1000
    """Resamplings for the 95 % interval, and exchanges for the p of a comparison; 0 leaves both out."""
    seed: int = 12345
    """Seed of both."""

    def __post_init__(self) -> None:
        unknown = [metric for metric in self.metrics if metric not in ("bleu", "chrf", "ter")]
        _check(
            (not unknown, f"eval.metrics has {', '.join(unknown)}; give some of bleu, chrf, ter."),
            ("bleu" in self.metrics, "eval.metrics lacks bleu; it is always reported."),
            *(
                (getattr(self, name) >= 0, f"eval.{name} is {getattr(self, name)}; give 0 or more.")
                for name in ("bootstrap", "seed")
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, in the order of the pipeline."""

    recipe: str = "default"
    """Stem of the file the settings came from; the first half of a run's name."""
    data: DataConfig = field(default_factory=DataConfig)
    clean: CleanConfig = field(default_factory=CleanConfig)
    bpe: BpeConfig = field(default_factory=BpeConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    translate: TranslateConfig = field(default_factory=TranslateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        _check(
            (
                {self.data.src, self.data.tgt} == set(self.clean.columns),
                f"data.src and data.tgt are {self.data.src} and {self.data.tgt}, "
                f"but clean.columns is {list(self.clean.columns)}.",
            ),
            (
                self.model.position != "learned" or self.encode.max_tokens <= self.model.max_positions,
                f"encode.max_tokens is {self.encode.max_tokens}, more than model.max_positions "
                f"({self.model.max_positions}).",
            ),
            (
                self.translate.beam <= self.bpe.vocab_size,
                f"translate.beam is {self.translate.beam}, more than the vocabulary has pieces; give at most "
                f"{self.bpe.vocab_size} (bpe.vocab_size).",
            ),
            (
                "ter" not in self.eval.metrics or knows_words(self.data.tgt),
                f"eval.metrics has ter, which takes a line of {self.data.tgt} for one word; leave it out.",
            ),
        )

    @property
    def direction(self) -> str:
        """`en-zh`."""
        return f"{self.data.src}-{self.data.tgt}"


SECTIONS: dict[str, type[Any]] = {name: kind for name, kind in typing.get_type_hints(Config).items() if kind is not str}


def kinds(section: type[Any]) -> dict[str, Kind]:
    """The kind of each setting of a section."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {name: getattr(hint, "__metadata__", ("result",))[0] for name, hint in hints.items()}


def of_kind(settings: Any, kind: Kind) -> dict[str, Any]:
    """The settings of one kind of a section, as plain values."""
    found = kinds(type(settings))
    return {name: value for name, value in to_dict(settings).items() if found[name] == kind}


def to_dict(settings: Any) -> dict[str, Any]:
    """A section, or the whole Config, as plain values for JSON and YAML; tuples become lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return value

    return {key: plain(value) for key, value in dataclasses.asdict(settings).items()}
