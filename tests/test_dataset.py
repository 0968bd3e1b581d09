"""Encoded data against the tokenizer and the text that it came from."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bars import watched_bars
from nmt.config import BpeConfig, EncodeConfig
from nmt.data import dataset
from nmt.data.dataset import Column, Lines, encode_corpus, open_dataset, read_meta, resample
from nmt.data.tokenizer import load_tokenizers
from nmt.data.train_tokenizer import train_bpe
from nmt.errors import DataError
from nmt.io import read_lines, write_lines
from nmt.special_tokens import EOS, PAD

ENGLISH = [
    f"the {colour} {thing} number {n}" for colour in ("red", "green") for thing in ("book", "cup") for n in range(20)
]
CHINESE = [f"第{n}个{colour}{thing}" for colour in ("红", "绿") for thing in ("书", "杯子") for n in range(20)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Clean text and a vocabulary."""
    root = tmp_path_factory.mktemp("corpus")
    for split, part in {"train": slice(0, None), "dev": slice(0, 7), "test": slice(3, 9)}.items():
        write_lines(root / f"{split}.en", ENGLISH[part])
        write_lines(root / f"{split}.zh", CHINESE[part])
    (root / "bpe").mkdir()
    train_bpe(root, BpeConfig(vocab_size=320, character_coverage=1.0), ("en", "zh"), root / "bpe")
    return root, root / "bpe"


def encoded(folders: tuple[Path, Path], out: Path, **settings) -> Path:
    out.mkdir()
    encode_corpus(folders[0], folders[1], EncodeConfig(**settings), ("en", "zh"), out)
    return out


def test_what_was_encoded_decodes_to_the_text_in_both_directions(folders, tmp_path):
    out = encoded(folders, tmp_path / "e")
    for src, tgt, lines in (("en", "zh", ENGLISH), ("zh", "en", CHINESE)):
        data = open_dataset(out, "train", src, tgt)
        tokenizer, _ = load_tokenizers(folders[1], src, tgt)
        assert len(data) == len(lines)
        assert all(data.src[i][-1] == EOS for i in range(len(data)))
        assert tokenizer.decode([data.src[i].tolist() for i in range(len(data))]) == lines
        assert data.src.lengths.tolist() == [len(ids) + 1 for ids in tokenizer.encode(lines)]
    assert data.src.ids.dtype == np.uint16
    assert data.rows.tolist() == list(range(len(ENGLISH)))


def test_a_batch_of_pairs_has_both_sides_in_the_order_asked_for(folders, tmp_path):
    data = open_dataset(encoded(folders, tmp_path / "e"), "train", "en", "zh")
    src, tgt = data.take(np.array([7, 2]))
    tokenizer, _ = load_tokenizers(folders[1], "en", "zh")
    assert tokenizer.decode([ids[ids != PAD].tolist() for ids in src]) == [ENGLISH[7], ENGLISH[2]]
    assert tokenizer.decode([ids[ids != PAD].tolist() for ids in tgt]) == [CHINESE[7], CHINESE[2]]


def slow_padded(column: Column, rows: np.ndarray) -> np.ndarray:
    """Each row in turn."""
    found = [column.ids[column.offsets[row] : column.offsets[row + 1]].tolist() for row in rows]
    return np.array([ids + [PAD] * (max(map(len, found)) - len(ids)) for ids in found], np.int64)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("mapped", [False, True])
@given(data=st.data())
def test_sentences_are_padded_into_one_matrix_as_they_would_be_one_by_one(tmp_path_factory, dtype, mapped, data):
    most = np.iinfo(dtype).max
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    ids = np.array(data.draw(st.lists(st.integers(1, most), min_size=sum(lengths), max_size=sum(lengths))), dtype)
    column = Column(ids, np.concatenate([[0], np.cumsum(lengths)]))
    if mapped:
        folder = tmp_path_factory.mktemp("mapped")
        for name, numbers in (("ids", ids), ("offsets", column.offsets)):
            (folder / name).write_bytes(numbers.tobytes())
        column = Column(dataset._mapped(folder / "ids", dtype), dataset._mapped(folder / "offsets", np.int64))
    rows = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=40)))
    found = column.padded(rows)
    assert found.dtype == np.int64
    assert np.array_equal(found, slow_padded(column, rows))
    assert column.lengths.tolist() == lengths


def test_lengths_are_worked_out_once_and_files_are_mapped_and_not_read(folders, tmp_path, monkeypatch):
    out = encoded(folders, tmp_path / "e")
    diffs, diff = [], np.diff
    monkeypatch.setattr(dataset.np, "diff", lambda *given: diffs.append(given) or diff(*given))
    data = open_dataset(out, "train", "en", "zh")
    for column in (data.src, data.tgt):
        assert column.lengths is column.lengths
    assert len(diffs) == 2, "one a side, the check that they are positive counted"
    for array in (data.src.ids, data.src.offsets, data.tgt.ids, data.tgt.offsets, data.rows):
        base = array
        while base.base is not None and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap)
        assert type(array) is np.ndarray, "of which parts are taken faster than of a memmap"
        assert not array.flags.writeable


def test_a_process_that_does_not_verify_neither_hashes_nor_looks_through_what_it_shares(folders, tmp_path, monkeypatch):
    out = encoded(folders, tmp_path / "e")
    monkeypatch.setattr(dataset, "sha256_of", lambda path: pytest.fail("hashed"))
    monkeypatch.setattr(dataset.np, "diff", lambda *given: pytest.fail("looked through"))
    assert len(open_dataset(out, "train", "en", "zh", verify=False)) == len(ENGLISH)


@pytest.mark.parametrize("block", [1, 7, 2**24])
@given(lines=st.lists(st.text(st.characters(exclude_characters="\n\r\ufeff", exclude_categories=["Cs"])), max_size=9))
def test_lines_that_are_asked_for_are_those_of_the_whole_file(tmp_path_factory, block, lines):
    path = tmp_path_factory.mktemp("lines") / "train.en"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "BLOCK", block)
        for end in ("\n", ""):
            path.write_bytes("\n".join(lines).encode() + end.encode())
            whole = read_lines(path)
            rows = np.arange(len(whole))[::-1]
            assert Lines(path).take(rows) == whole[::-1]


def test_lines_that_are_not_there_or_not_text_are_told(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*train\.en.*; run nmt clean again"):
        Lines(tmp_path / "train.en")
    (tmp_path / "train.en").write_bytes(b"a\n\xff\n")
    lines = Lines(tmp_path / "train.en")
    assert lines.take(np.array([0])) == ["a"]
    with pytest.raises(DataError, match=r"train\.en, line 2 is not UTF-8"):
        lines.take(np.array([1]))


def test_some_pairs_cut_anew_come_in_the_order_asked_for_with_their_lines(folders, tmp_path):
    plain = open_dataset(encoded(folders, tmp_path / "e"), "train", "en", "zh")
    tokenizers = load_tokenizers(folders[1], "en", "zh")
    pairs = np.array([7, 2, 40])
    text = [ENGLISH[i] for i in pairs], [CHINESE[i] for i in pairs]
    drawn = resample(plain, pairs, text, tokenizers, 0.5, 3, 512)
    assert drawn.rows.tolist() == plain.rows[pairs].tolist()
    for column, tokenizer, lines in zip((drawn.src, drawn.tgt), tokenizers, text, strict=True):
        assert tokenizer.decode([column[i].tolist() for i in range(3)]) == lines
    same = resample(plain, pairs, text, tokenizers, 0.5, 3, 2)  # Nothing but plain pieces is short enough.
    assert [same.src[i].tolist() for i in range(3)] == [plain.src[int(i)].tolist() for i in pairs]


def test_each_language_is_encoded_with_its_own_vocabulary(folders, tmp_path):
    for name in ("bpe", "encode"):
        (tmp_path / name).mkdir()
    train_bpe(
        folders[0],
        BpeConfig(vocab_size=300, character_coverage=1.0, shared_vocab=False),
        ("en", "zh"),
        tmp_path / "bpe",
    )
    meta = encode_corpus(folders[0], tmp_path / "bpe", EncodeConfig(), ("en", "zh"), tmp_path / "encode")
    assert meta == read_meta(tmp_path / "encode")
    tokenizers = load_tokenizers(tmp_path / "bpe", "en", "zh")
    assert tokenizers[0].encode(ENGLISH) != tokenizers[1].encode(ENGLISH)
    assert meta["vocab_size"] == [len(tokenizer) for tokenizer in tokenizers]
    data = open_dataset(tmp_path / "encode", "train", "en", "zh")
    for column, tokenizer, lines in ((data.src, tokenizers[0], ENGLISH), (data.tgt, tokenizers[1], CHINESE)):
        assert [column[i].tolist() for i in range(len(data))] == [[*ids, EOS] for ids in tokenizer.encode(lines)]


class Counting:
    """A tokenizer of `size` pieces: a line is its last so many pieces."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def encode(self, lines: list[str]) -> list[list[int]]:
        return [list(range(self.size - int(line), self.size)) for line in lines]


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_the_last_piece_of_a_large_vocabulary_survives(tmp_path, monkeypatch, size, dtype):
    for name in ("train.en", "train.zh", "dev.en", "dev.zh", "test.en", "test.zh"):
        write_lines(tmp_path / name, ["3", "1"] if name.endswith("en") else ["2", "5"])
    monkeypatch.setattr(dataset, "load_tokenizers", lambda *_: (Counting(size), Counting(99)))
    (tmp_path / "out").mkdir()
    encode_corpus(tmp_path, tmp_path, EncodeConfig(), ("en", "zh"), tmp_path / "out")
    data = open_dataset(tmp_path / "out", "train", "en", "zh")
    assert [data.src[i].tolist() for i in (0, 1)] == [[size - 3, size - 2, size - 1, EOS], [size - 1, EOS]]
    assert (data.src.ids.dtype, data.tgt.ids.dtype) == (dtype, np.uint16)
    assert (tmp_path / "out" / "train.en.ids").stat().st_size == 6 * np.dtype(dtype).itemsize


def test_what_is_written_down_are_the_pairs_and_tokens_of_each_split(folders, tmp_path):
    meta = read_meta(encoded(folders, tmp_path / "e"))
    tokenizer, _ = load_tokenizers(folders[1], "en", "zh")
    for split, part in {"train": slice(0, None), "dev": slice(0, 7), "test": slice(3, 9)}.items():
        tokens = [sum(len(ids) + 1 for ids in tokenizer.encode(lines[part])) for lines in (ENGLISH, CHINESE)]
        expected = {"pairs": len(ENGLISH[part]), "dropped": 0, "en_tokens": tokens[0], "zh_tokens": tokens[1]}
        assert meta["splits"][split] == expected
    assert meta["languages"] == ["en", "zh"]
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "e").iterdir()}
    del files["meta.json"]
    assert meta["sha256"] == files


def test_a_pair_of_exactly_the_longest_length_stays_whichever_side_is_longer(folders, tmp_path):
    tokenizer, _ = load_tokenizers(folders[1], "en", "zh")
    longest = max(len(ids) + 1 for lines in (ENGLISH, CHINESE) for ids in tokenizer.encode(lines))
    assert read_meta(encoded(folders, tmp_path / "all", max_tokens=longest))["splits"]["train"]["dropped"] == 0
    for name, columns in (("en", (["b " * 20, "a"], ["a", "a"])), ("zh", (["a", "a"], ["b " * 20, "a"]))):
        root = tmp_path / name
        for split in ("train", "dev", "test"):
            (root / "out").mkdir(parents=True, exist_ok=True)
            for language, lines in zip(("en", "zh"), columns, strict=True):
                write_lines(root / f"{split}.{language}", lines)
        meta = encode_corpus(root, folders[1], EncodeConfig(max_tokens=9), ("en", "zh"), root / "out")
        assert [meta["splits"]["train"][key] for key in ("pairs", "dropped")] == [1, 1]


def test_long_pairs_are_dropped_and_counted_and_none_is_cut(folders, tmp_path):
    lengths = open_dataset(encoded(folders, tmp_path / "all"), "train", "en", "zh").src.lengths
    longest = int(lengths.max())
    out = encoded(folders, tmp_path / "short", max_tokens=longest - 1)
    data, counts = open_dataset(out, "train", "en", "zh"), read_meta(out)["splits"]["train"]
    assert counts["dropped"] == int((lengths == longest).sum()) > 0
    assert counts["pairs"] == len(data) == len(ENGLISH) - counts["dropped"]
    tokenizer, _ = load_tokenizers(folders[1], "en", "zh")
    kept = [ENGLISH[row] for row in data.rows]
    assert tokenizer.decode([data.src[i].tolist() for i in range(len(data))]) == kept


def test_windows_do_not_change_what_is_written(folders, tmp_path, monkeypatch):
    whole = encoded(folders, tmp_path / "whole")
    for window in (7, len(ENGLISH) // 2):
        monkeypatch.setattr(dataset, "WINDOW", window)
        parts = encoded(folders, tmp_path / f"parts of {window}")
        assert read_meta(whole) == read_meta(parts)
        assert open_dataset(parts, "train", "en", "zh").rows.tolist() == list(range(len(ENGLISH)))


def test_no_more_than_a_window_of_text_is_held_at_once(folders, monkeypatch):
    monkeypatch.setattr(dataset, "WINDOW", 7)
    windows = list(dataset._windows(folders[0], "train", ("en", "zh")))
    assert [len(window[0]) for window in windows] == [7] * (len(ENGLISH) // 7) + [len(ENGLISH) % 7]
    assert [line for window in windows for line in window[1]] == CHINESE


def test_the_progress_bar_counts_every_pair_once(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "WINDOW", 7)
    bars = watched_bars(monkeypatch, dataset)
    encoded(folders, tmp_path / "e", max_tokens=12)
    (bar,) = bars
    assert bar.total == bar.n == len(ENGLISH) + 7 + 6
    assert bar.moves > 10


def test_the_counts_are_a_table_with_a_head_in_the_order_of_the_splits(folders, tmp_path):
    meta = read_meta(encoded(folders, tmp_path / "e"))
    head, *rows = dataset.table_of_counts(meta)
    assert head.split() == ["pairs", "too", "long", "en", "tokens", "zh", "tokens"]
    assert [row.split()[0] for row in rows] == ["train", "dev", "test"]
    assert len({len(line) for line in (head, *rows)}) == 1
    train = meta["splits"]["train"]
    assert rows[0].split()[1:] == [f"{train[key]:,}" for key in ("pairs", "dropped", "en_tokens", "zh_tokens")]
    other_way = {**meta, "languages": ["zh", "en"]}
    assert dataset.table_of_counts(other_way)[0].split()[-4:] == ["zh", "tokens", "en", "tokens"]


def test_nothing_left_to_train_on_or_to_validate_with_is_refused(folders, tmp_path):
    with pytest.raises(DataError, match=r"no train pair .* is left"):
        encoded(folders, tmp_path / "none", max_tokens=2)
    for split in ("train", "dev", "test"):
        for language in ("en", "zh"):
            write_lines(tmp_path / f"{split}.{language}", ["a"] if split == "train" else ["a " * 99])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"no dev pair .* is left; encode.max_tokens is 9"):
        encode_corpus(tmp_path, folders[1], EncodeConfig(max_tokens=9), ("en", "zh"), tmp_path / "out")


def test_a_test_set_of_nothing_is_no_obstacle(folders, tmp_path):
    for split in ("train", "dev", "test"):
        for language in ("en", "zh"):
            write_lines(tmp_path / f"{split}.{language}", [] if split == "test" else ["a"])
    (tmp_path / "out").mkdir()
    encode_corpus(tmp_path, folders[1], EncodeConfig(), ("en", "zh"), tmp_path / "out")
    empty = open_dataset(tmp_path / "out", "test", "en", "zh")
    assert (len(empty), len(empty.rows), empty.src.lengths.tolist()) == (0, 0, [])


def test_unequal_files_are_refused(folders, tmp_path):
    for name in ("train.en", "train.zh", "dev.en", "dev.zh", "test.en", "test.zh"):
        write_lines(tmp_path / name, ["a", "b"] if name == "dev.zh" else ["a"])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="different numbers of lines"):
        encode_corpus(tmp_path, folders[1], EncodeConfig(), ("en", "zh"), tmp_path / "out")


def test_a_cut_file_and_another_format_are_refused(folders, tmp_path):
    out = encoded(folders, tmp_path / "e")
    ids = out / "train.en.ids"
    ids.write_bytes(ids.read_bytes()[:-4])
    with pytest.raises(DataError, match="run nmt encode again"):
        open_dataset(out, "train", "en", "zh")
    meta = json.loads((out / "meta.json").read_text())
    (out / "meta.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(DataError, match="format 99"):
        read_meta(out)
    with pytest.raises(DataError, match="run nmt encode"):
        read_meta(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"languages": [1, 2]},
        {"languages": ["en", 2]},
        {"languages": ["en"]},
        {"vocab_size": [320, "320"]},
        {"vocab_size": 320},
        {"sha256": []},
        {"splits": ["train"]},
        {"splits": None},
        {"format": None},
    ],
)
def test_a_description_of_other_types_is_refused(folders, tmp_path, change):
    meta = encoded(folders, tmp_path / "e") / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | change))
    with pytest.raises(DataError, match=r"run nmt encode\."):
        read_meta(tmp_path / "e")
    for text in ("[1]", "{}", "{", "[" * 10**5):
        meta.write_text(text)
        with pytest.raises(DataError, match="is no folder of encoded data"):
            read_meta(tmp_path / "e")


def rewritten(folder: Path, name: str, change) -> None:
    """Change the numbers of a file, and list its new hash."""
    numbers = change(np.fromfile(folder / name, dtype=np.uint16 if name.endswith("ids") else np.int64))
    numbers.tofile(folder / name)
    meta = json.loads((folder / "meta.json").read_text())
    meta["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train.en.ids", lambda ids: ids[:-1], "tokens, but others are listed"),
        ("train.en.ids", lambda ids: ids[:0], "0 tokens, but others are listed"),
        ("train.en.offsets", lambda offsets: offsets[:0], "tokens, but others are listed"),
        ("train.en.offsets", lambda offsets: offsets[1:], "tokens, but others are listed"),
        ("train.en.offsets", lambda offsets: offsets[:-1], "tokens, but others are listed"),
        ("train.en.offsets", lambda offsets: offsets[[0, 0, *range(1, len(offsets))]], "tokens, but others are listed"),
        ("train.en.offsets", lambda offsets: offsets[[0, *range(2, len(offsets))]], "sides of different lengths"),
        ("train.zh.offsets", lambda offsets: offsets[[0, *range(2, len(offsets))]], "sides of different lengths"),
        ("train.rows", lambda rows: rows[1:], "sides of different lengths in train"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(folders, tmp_path, name, change, message):
    out = encoded(folders, tmp_path / "e")
    rewritten(out, name, change)
    with pytest.raises(DataError, match=message):
        open_dataset(out, "train", "en", "zh")


@pytest.mark.parametrize("name", ["train.en.ids", "train.zh.ids", "train.zh.offsets", "train.rows"])
def test_a_single_wrong_bit_is_found(folders, tmp_path, name):
    out = encoded(folders, tmp_path / "e")
    raw = bytearray((out / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (out / name).write_bytes(raw)
    with pytest.raises(DataError, match=rf"{name} is not what was written .*run nmt encode again"):
        open_dataset(out, "train", "en", "zh")


def test_a_language_or_a_file_that_is_not_there_is_named(folders, tmp_path):
    out = encoded(folders, tmp_path / "e")
    for src, tgt in (("de", "zh"), ("en", "de")):
        with pytest.raises(DataError, match=r"has en, zh, not de; check data\.src and data\.tgt"):
            open_dataset(out, "train", src, tgt)
    (out / "train.rows").unlink()
    with pytest.raises(DataError, match=r"cannot read .*train\.rows.*; run nmt encode again"):
        open_dataset(out, "train", "en", "zh")


def test_the_two_sides_and_all_seeds_draw_different_pieces(folders, tmp_path):
    plain = open_dataset(encoded(folders, tmp_path / "e"), "train", "en", "en")
    tokenizers = load_tokenizers(folders[1], "en", "en")
    drawn = [
        resample(plain, np.arange(len(plain)), (ENGLISH, ENGLISH), tokenizers, 0.3, seed, 512) for seed in range(4)
    ]
    columns = [side for pairs in drawn for side in (pairs.src, pairs.tgt)]
    assert len({tuple(column.ids.tolist()) for column in columns}) == 8, "the same text, cut in eight ways"
    assert not any(np.array_equal(pairs.src.lengths, pairs.tgt.lengths) for pairs in drawn)
    # Nor do they go together: where one side has more pieces than usual, the other has no more than elsewhere.
    counts = [np.concatenate([getattr(pairs, side).lengths for pairs in drawn]) for side in ("src", "tgt")]
    extra = [count - np.tile(plain.src.lengths, 4) for count in counts]
    assert abs(np.corrcoef(*extra)[0, 1]) < 0.25


def test_sampled_pieces_spell_the_same_text_and_follow_the_seed(folders, tmp_path):
    plain = open_dataset(encoded(folders, tmp_path / "e"), "train", "en", "zh")
    tokenizers = load_tokenizers(folders[1], "en", "zh")
    first, again, other = (
        resample(plain, np.arange(len(plain)), (ENGLISH, CHINESE), tokenizers, 0.3, seed, 512) for seed in (1, 1, 2)
    )
    for side, lines, tokenizer in (("src", ENGLISH, tokenizers[0]), ("tgt", CHINESE, tokenizers[1])):
        column = getattr(first, side)
        assert tokenizer.decode([column[i].tolist() for i in range(len(first))]) == lines
        assert np.array_equal(column.ids, getattr(again, side).ids)
        assert not np.array_equal(column.ids, getattr(other, side).ids)
    assert first.src.lengths.sum() > plain.src.lengths.sum()


def test_a_pair_that_sampling_makes_too_long_keeps_its_plain_pieces(folders, tmp_path):
    plain = open_dataset(encoded(folders, tmp_path / "e"), "train", "en", "zh")
    tokenizers = load_tokenizers(folders[1], "en", "zh")
    free = resample(plain, np.arange(len(plain)), (ENGLISH, CHINESE), tokenizers, 0.5, 1, 512)
    lengths = np.maximum(free.src.lengths, free.tgt.lengths)
    bound = int(np.median(lengths))
    bounded = resample(plain, np.arange(len(plain)), (ENGLISH, CHINESE), tokenizers, 0.5, 1, bound)
    for i in range(len(plain)):
        expected = free if lengths[i] <= bound else plain
        assert np.array_equal(bounded.src[i], expected.src[i])
        assert np.array_equal(bounded.tgt[i], expected.tgt[i])
