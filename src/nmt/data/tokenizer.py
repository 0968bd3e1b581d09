"""bpe: the subword vocabulary. Text -> ids -> the same text; nothing here ever rewrites a character.

The only importer of sentencepiece. Models are trained with the identity rule and no dummy prefix, with byte fallback,
so that decode(encode(x)) == x for every line x without U+2581 (which stands for the space, and which clean maps away).
"""

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from tqdm import tqdm

from nmt.config import BpeConfig
from nmt.errors import ConfigError, DataError, counted
from nmt.io import read_lines, write_bytes, write_lines
from nmt.special_tokens import BOS, EOS, PAD, UNK

SPACE = "\u2581"
"""What SentencePiece writes for a space."""

RARE = 10
"""A piece that is seen fewer times in train hardly gets a useful embedding."""

BLOCK_LINES = 10_000
"""Lines between two moves of the progress bar."""

LONGEST_REMEMBERED = 64
"""Characters of the longest unit whose segmentations are remembered; few longer ones ever come twice."""

PROBE = f" ，！？（）…  ｆｕｌｌ ① e\u0301 ﬁ  \u3000你\u200b好 {chr(0xFFFD)} 😀 "
"""Compatibility characters, double spaces and combining marks: a model that rewrites any of them is refused."""


class Tokenizer:
    """A SentencePiece BPE model."""

    def __init__(self, model: bytes, name: str) -> None:
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.name = name
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            self._pieces: list[str] = [self._processor.IdToPiece(i) for i in range(len(self))]
        except (RuntimeError, UnicodeDecodeError) as error:
            raise DataError(f"{name} is not a SentencePiece model; make it again with nmt bpe.") from error
        self._merges = _Merges(self._processor, self._pieces)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """The model of the file `path`; raises DataError where there is none."""
        try:
            return cls(Path(path).read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; nmt bpe makes it.") from error

    def __len__(self) -> int:
        return int(self._processor.GetPieceSize())

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line, without bos and eos."""
        found: list[list[int]] = self._processor.Encode(list(lines), return_type=int)
        return found

    def encode_sampled(self, lines: Sequence[str], dropout: float, seed: int) -> list[list[int]]:
        """The ids of each line with each merge skipped with probability `dropout` (Provilkov et al. 2020).

        The same for the same arguments, in any process; and each sample decodes to its line.
        """
        assert 0 <= dropout < 1
        return self._merges.sample(lines, dropout, seed) if dropout else self.encode(lines)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of ids; pad, bos and eos are nothing, bytes that are no UTF-8 become U+FFFD."""
        silent = (PAD, BOS, EOS)
        ids = [[int(i) for i in row if i not in silent] for row in rows]
        # SentencePiece takes an empty list for one empty row; and a model whose train had no space (Chinese alone)
        # writes one as the three bytes of U+2581.
        return [text.replace(SPACE, " ") for text in self._processor.Decode(ids)] if ids else []

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id, as the vocabulary spells it (▁ for a space, <0xE4> for a byte)."""
        return [self._pieces[i] for i in ids]

    def id_of(self, piece: str) -> int:
        """The id of a piece; raises DataError if the vocabulary lacks it."""
        found = int(self._processor.PieceToId(piece))
        if self._pieces[found] != piece:
            raise DataError(f"{self.name} has no piece {piece!r}; bpe.user_symbols adds pieces.")
        return found

    def vocabulary(self) -> list[str]:
        """`piece TAB score` for each id, as SentencePiece writes a .vocab file."""
        return [f"{piece}\t{self._processor.GetScore(i):g}" for i, piece in enumerate(self._pieces)]

    def is_byte(self, id: int) -> bool:
        """Whether the piece is one byte of a character that has no piece."""
        return bool(self._processor.IsByte(id))

    def faults(self, lines: Sequence[str]) -> list[str]:
        """What keeps this model, which may come from elsewhere, from serving here; `lines` are some of its text."""
        found = []
        named = {"pad": PAD, "unk": UNK, "bos": BOS, "eos": EOS}
        ids = {name: int(getattr(self._processor, f"{name}_id")()) for name in named}
        if ids != named:
            found.append(f"its ids are {ids}, not {named}")
        if sum(map(self.is_byte, range(len(self)))) != 256:
            found.append("it has no byte fallback, so it has unknown characters")
        if self._processor.Normalize(PROBE) != PROBE.replace(" ", SPACE):
            found.append("it rewrites text or adds a dummy prefix; train it with --normalization_rule_name=identity "
                         "--remove_extra_whitespaces=false --add_dummy_prefix=false")  # fmt: skip
        if not found and self.encode(lines) != self._merges.sample(lines, 0.0, seed=0):
            found.append("it is not a BPE model")
        return found


# ── BPE-dropout ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Merges:
    """The merges of a model, done here because SentencePiece salts its generator in each process.

    (0.2.3 does: with the same seed another process draws other samples, so no training could go on to the same end.)
    What makes this fast: a line is cut between any two characters that stand side by side in no piece; such units
    come again and again, and so do the ways they are segmented, which are remembered.
    """

    def __init__(self, processor: Any, pieces: Sequence[str]) -> None:
        first_byte = next((i for i in range(len(pieces)) if processor.IsByte(i)), len(pieces))
        normal = [i for i in range(len(pieces)) if not (processor.IsControl(i) or processor.IsByte(i) or i == UNK)]
        # SentencePiece numbers user symbols before the bytes, and the pieces that it learnt after them.
        user = sorted((pieces[i] for i in normal if i < first_byte), key=len, reverse=True)
        self._whole = frozenset(user)
        self._symbols = re.compile("|".join([*map(re.escape, user), "."]), re.DOTALL)
        self._ids = {pieces[i]: i for i in normal}
        self._ranks = {pieces[i]: -processor.GetScore(i) for i in normal if pieces[i] not in self._whole}
        self._bytes = [processor.PieceToId(f"<0x{byte:02X}>") for byte in range(256)]
        neighbours = {ord(a) << 21 | ord(b) for piece in self._ids for a, b in pairwise(piece)}
        # Ends in a number above every pair, so that a search always lands on one.
        self._neighbours = np.array([*sorted(neighbours), np.iinfo(np.int64).max], dtype=np.int64)
        self._remember = lru_cache(maxsize=1 << 18)(lambda unit, skipped: self._segment(unit, iter(skipped)))

    def sample(self, lines: Sequence[str], dropout: float, seed: int) -> list[list[int]]:
        """The ids of each line when each merge is skipped with probability `dropout`."""
        gaps, remember = _gaps(dropout, seed), self._remember
        rows = []
        for units in self._units(lines):
            row: list[int] = []
            for unit in units:
                if len(unit) > LONGEST_REMEMBERED:
                    row.extend(self._segment(unit, accumulate(gaps, lambda at, gap: at + 1 + gap))[0])
                    continue
                ids, tries = remember(unit, ())
                if tries:
                    skipped: tuple[int, ...] = ()
                    at = next(gaps)
                    while at < tries:
                        skipped += (at,)
                        ids, tries = remember(unit, skipped)
                        at += 1 + next(gaps)
                row.extend(ids)
            rows.append(row)
        return rows

    def _units(self, lines: Sequence[str]) -> Iterator[list[str]]:
        """Each line in parts that no piece reaches across."""
        text = "".join(lines).replace(" ", SPACE)
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4").astype(np.int64)
        ends = np.cumsum([len(line) for line in lines], dtype=np.int64)
        cut = np.ones(len(text) + 1, dtype=bool)
        pairs = codes[:-1] << 21 | codes[1:]
        cut[1:-1] = self._neighbours[np.searchsorted(self._neighbours, pairs)] != pairs
        cut[ends] = True
        cuts = np.flatnonzero(cut)
        bounds, last = cuts.tolist(), np.searchsorted(cuts, ends).tolist()
        start = 0
        for line, stop in zip(lines, last, strict=True):
            yield [text[bounds[i] : bounds[i + 1]] for i in range(start, stop)] if line else []
            start = stop

    def _segment(self, unit: str, skips: Iterator[int]) -> tuple[tuple[int, ...], int]:
        """The ids of a unit, and how many merges were tried; of the tries those in `skips` (rising) don't merge.

        As in SentencePiece: the best of all neighbours first, of equals the leftmost; what was skipped once is not
        tried again, but its parts may merge with others.
        """
        parts = self._symbols.findall(unit)
        before, after = list(range(-1, len(parts) - 1)), [*range(1, len(parts)), -1]
        ranks, whole = self._ranks, self._whole
        agenda: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0 and parts[left] not in whole and parts[right] not in whole:
                merged = parts[left] + parts[right]
                rank = ranks.get(merged)
                if rank is not None:
                    heappush(agenda, (rank, left, right, merged))

        for left in range(len(parts) - 1):
            offer(left, left + 1)
        tries, skip = 0, next(skips, -1)
        while agenda:
            _, left, right, merged = heappop(agenda)
            # Either part may have merged with another since, or into another, which leaves nothing in its place.
            if not parts[left] or not parts[right] or parts[left] + parts[right] != merged:
                continue
            tries += 1
            if skip == tries - 1:
                skip = next(skips, -1)
                continue
            parts[left], parts[right] = merged, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return tuple(chain.from_iterable(map(self._ids_of, filter(None, parts)))), tries

    def _ids_of(self, part: str) -> list[int]:
        known = self._ids.get(part)
        return [known] if known is not None else [self._bytes[byte] for byte in part.encode()]


def _gaps(dropout: float, seed: int) -> Iterator[int]:
    """How many merges are done before the next one that is skipped, without end."""
    if not dropout:
        while True:
            yield 1 << 62
    random = np.random.default_rng(seed)
    while True:
        yield from (random.geometric(dropout, size=1 << 14) - 1).tolist()


# ── bpe ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def train_bpe(clean: Path, settings: BpeConfig, languages: tuple[str, str], out: Path) -> dict[str, Any]:
    """Make the models of `clean/train.{language}` in `out`, and verification.json beside them; returns the certificate.

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
    if verification["bleu_ceiling"] is None:
        raise DataError(f"{clean}/dev.*: some lines don't come back from the vocabulary as they were.")
    return verification


def load_tokenizers(folder: Path, src: str, tgt: str) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of source and target; the same object twice when they share a vocabulary."""
    joint = folder / "joint.model"
    if joint.exists():
        tokenizer = Tokenizer.load(joint)
        return tokenizer, tokenizer
    return Tokenizer.load(folder / f"{src}.model"), Tokenizer.load(folder / f"{tgt}.model")


def verify_tokenizer(
    tokenizers: Mapping[str, Tokenizer],
    train: Mapping[str, Sequence[str]],
    dev: Mapping[str, Sequence[str]],
    done: Callable[[int], object] = lambda lines: None,
) -> dict[str, Any]:
    """What the vocabulary does to each language's text, and how much of it train fills.

    `bleu_ceiling` is what a perfect output can score on dev: 100 when every line comes back as it was, else unknown.
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
    return {"models": models, "sides": sides, "bleu_ceiling": 100.0 if whole else None}


def verification_lines(verification: Mapping[str, Any]) -> list[str]:
    """The certificate as a table for the terminal."""
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
    ceiling = verification["bleu_ceiling"]
    return [*found, f"BLEU ceiling on dev: {ceiling:.1f}" if ceiling else "BLEU ceiling on dev: below 100"]


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
