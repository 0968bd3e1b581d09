"""bpe: train a subword vocabulary with SentencePiece, and verify that every line survives encoding and decoding."""

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import sentencepiece
from tqdm import tqdm

from nmt.config import BpeConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, DataError, counted
from nmt.io import read_lines, write_bytes, write_lines
from nmt.special_tokens import BOS, EOS, PAD, UNK

RARE = 10
"""A piece that is seen fewer times in train hardly gets a useful embedding."""


BLOCK_LINES = 10_000
"""Lines between two moves of the progress bar."""


def train_bpe(clean: Path, settings: BpeConfig, languages: tuple[str, str], out: Path) -> dict[str, Any]:
    """Train the models of `clean/train.{language}` in `out` and write verification.json; return the verification.

    Raises ConfigError for a vocabulary that this corpus can't have, DataError for a model that doesn't give text back.
    """
    train = {language: read_lines(clean / f"train.{language}") for language in languages}
    dev = {language: read_lines(clean / f"dev.{language}") for language in languages}
    names = {"joint": languages} if settings.shared_vocab else {language: (language,) for language in languages}
    out.mkdir(parents=True, exist_ok=True)
    tokenizers: dict[str, Tokenizer] = {}
    # Each line is read once to learn from, unless the model exists, and once to check.
    total = (1 if settings.model else 2) * sum(map(len, train.values()))
    with tqdm(total=total, desc="bpe", unit=" lines", disable=None, leave=False) as bar:
        for number, (name, sides) in enumerate(names.items()):
            lines = [line for side in sides for line in train[side]]
            if not any(lines):
                raise DataError(f"{clean} has no text to learn a vocabulary from; look at the report of nmt clean.")
            model = (
                _existing(settings.model[number], lines[:10_000]) if settings.model else _learn(lines, settings, bar)
            )
            tokenizer = Tokenizer(model, f"{name}.model")
            write_bytes(out / f"{name}.model", model)
            write_lines(out / f"{name}.vocab", tokenizer.vocabulary())
            tokenizers |= dict.fromkeys(sides, tokenizer)
        verification = verify_tokenizer(tokenizers, train, dev, bar.update)
    write_lines(out / "verification.json", [json.dumps(verification, ensure_ascii=False, indent=1)])
    for side, found in verification["sides"].items():
        if found["unknown"] or found["first_change"]:
            raise DataError(
                f"{clean / f'train.{side}'}: {counted(found['changed_lines'], 'line')} would come back changed (the "
                f"first is line {found['first_change']}), and {counted(found['unknown'], 'token')} would be unknown."
            )
    if verification["round_trip_bleu"] is None:
        raise DataError(f"{clean}/dev.*: some lines don't come back from the vocabulary as they were.")
    return verification


def verify_tokenizer(
    tokenizers: Mapping[str, Tokenizer],
    train: Mapping[str, Sequence[str]],
    dev: Mapping[str, Sequence[str]],
    done: Callable[[int], object] = lambda lines: None,
) -> dict[str, Any]:
    """What the vocabulary does to each language's text, and how much of it train fills.

    `round_trip_bleu` is the BLEU of dev after encoding and decoding: 100 if every line is unchanged, else unknown.
    `done` is told how many lines more have been looked at.
    """
    seen: dict[Tokenizer, Counter[int]] = {tokenizer: Counter() for tokenizer in tokenizers.values()}
    sides: dict[str, Any] = {}
    for side, tokenizer in tokenizers.items():
        here, changed, lines = Counter[int](), list[int](), train[side]
        for start in range(0, len(lines), BLOCK_LINES):
            block = lines[start : start + BLOCK_LINES]
            ids = tokenizer.encode(block)
            here.update(chain.from_iterable(ids))
            changed += [start + place for place in _changed(block, tokenizer.decode(ids))]
            done(len(block))
        seen[tokenizer] += here
        sides[side] = {
            "lines": len(lines),
            "tokens_per_sentence": here.total() / max(1, len(lines)),
            "byte_share": sum(n for i, n in here.items() if tokenizer.is_byte(i)) / max(1, here.total()),
            "unknown": here[UNK],
            "changed_lines": len(changed),
            "first_change": changed[0] + 1 if changed else None,
        }
    models = {}
    for tokenizer, counts in seen.items():
        learnt = [i for i in range(EOS + 1, len(tokenizer)) if not tokenizer.is_byte(i)]
        rare = sum(counts[i] < RARE for i in learnt)
        models[Path(tokenizer.name).stem] = {
            "sha256": tokenizer.sha256,
            "pieces": len(tokenizer),
            "rare_pieces": rare,
            "rare_share": rare / max(1, len(learnt)),
        }
    whole = not any(
        _changed(lines, tokenizers[side].decode(tokenizers[side].encode(lines))) for side, lines in dev.items()
    )
    return {"models": models, "sides": sides, "round_trip_bleu": 100.0 if whole else None}


def verification_lines(verification: Mapping[str, Any]) -> list[str]:
    """Format the verification as a table for the terminal."""
    found = []
    for name, model in verification["models"].items():
        found.append(
            f"{name}: {model['pieces']:,} pieces; {model['rare_pieces']:,} ({model['rare_share']:.1%}) are seen fewer "
            f"than {RARE} times in train"
        )
    found.append("       lines  tokens/line   bytes  unknown  changed by encode+decode")
    for side, row in verification["sides"].items():
        found.append(
            f"{side:<3}{row['lines']:>9,}{row['tokens_per_sentence']:>13.2f}{row['byte_share']:>8.2%}"
            f"{row['unknown']:>9,}{row['changed_lines']:>26,}"
        )
    round_trip = verification["round_trip_bleu"]
    return [
        *found,
        f"BLEU of the round trip on dev: {round_trip:.1f}"
        if round_trip
        else "BLEU of the round trip on dev: below 100",
    ]


def _changed(lines: Sequence[str], back: Sequence[str]) -> list[int]:
    """The places where two texts differ."""
    return [place for place, (line, other) in enumerate(zip(lines, back, strict=True)) if line != other]


def _existing(path: str, lines: Sequence[str]) -> bytes:
    """The model that bpe.model names, if it keeps to what the rest relies on."""
    try:
        model = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"bpe.model: cannot read {path}: {error.strerror}.") from error
    faults = Tokenizer(model, path).faults(lines)
    if faults:
        raise ConfigError(f"bpe.model: {path} can't be used: {'; '.join(faults)}.")
    return model


def _learn(lines: Sequence[str], settings: BpeConfig, bar: "tqdm[Any]") -> bytes:
    """A new model; raises ConfigError with the range that works where the corpus can't have the wanted vocabulary."""
    try:
        return _attempt(_shown(lines, bar), settings, settings.vocab_size)
    except RuntimeError as error:
        fewest, most = _limits(error)
        cause = error
    if fewest:
        raise ConfigError(
            f"bpe.vocab_size is {settings.vocab_size}, but the characters of this corpus alone need {fewest:,} pieces "
            f"at bpe.character_coverage {settings.character_coverage}; give at least {fewest:,}, or a lower coverage."
        ) from cause
    if most:
        try:
            _attempt(lines, settings, EOS + 1 + 256 + len(settings.user_symbols))
        except RuntimeError as error:
            fewest = _limits(error)[0]
        raise ConfigError(
            f"bpe.vocab_size is {settings.vocab_size}, but this corpus fills {most:,} pieces only; "
            f"give a number from {fewest:,} to {most:,}."
        ) from cause
    raise cause


def _limits(error: RuntimeError) -> tuple[int, int]:
    """The fewest and the most pieces that SentencePiece names in its refusal; 0 for what it doesn't say."""
    fewest = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
    most = re.search(r"set it to a value <= (\d+)", str(error))
    return int(fewest[1]) if fewest else 0, int(most[1]) if most else 0


def _shown(lines: Sequence[str], bar: "tqdm[Any]") -> Iterator[str]:
    """The lines, counted by the bar; SentencePiece says nothing of how far it is once it has read them."""
    for start in range(0, len(lines), BLOCK_LINES):
        yield from lines[start : start + BLOCK_LINES]
        bar.update(len(lines[start : start + BLOCK_LINES]))
    bar.set_description("bpe, learning the pieces")


def _attempt(lines: Iterable[str], settings: BpeConfig, vocab_size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        # Lines, not files: the model then holds no path, and a line ends where it ends in the rest of nmt.
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=settings.character_coverage,
        byte_fallback=True,
        user_defined_symbols=list(settings.user_symbols),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        # A prefix would put a token that means nothing before most Chinese lines (8.11 tokens a line on cmn, not 7.81).
        add_dummy_prefix=False,
        pad_id=PAD,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        # The default drops lines over 4,192 bytes without a word; this is the largest that is allowed.
        max_sentence_length=1 << 30,
        # The number of threads is stored in the model, which would be another file on another machine.
        num_threads=1,
        minloglevel=3,
    )
    return model.getvalue()
