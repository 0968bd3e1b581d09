"""bpe: the subword vocabulary. Text -> ids -> the same text; nothing here ever rewrites a character.

The only importer of sentencepiece. Models are trained with the identity rule and no dummy prefix, with byte fallback,
so that decode(encode(x)) == x for every line x without U+2581 (which stands for the space, and which clean maps away).
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from nmt.data.bpe_dropout import SPACE, Merges
from nmt.errors import DataError
from nmt.special_tokens import BOS, EOS, PAD, UNK

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
        self._merges = Merges(self._processor, self._pieces)

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


# ── bpe ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_tokenizers(folder: Path, src: str, tgt: str) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of source and target; the same object twice when they share a vocabulary."""
    joint = folder / "joint.model"
    if joint.exists():
        tokenizer = Tokenizer.load(joint)
        return tokenizer, tokenizer
    return Tokenizer.load(folder / f"{src}.model"), Tokenizer.load(folder / f"{tgt}.model")
