"""Encoded data against the tokenizer and the text that it came from."""

import json
from pathlib import Path

import numpy as np
import pytest

from bars import watched_bars
from nmt import dataset
from nmt.config import BpeConfig, EncodeConfig
from nmt.dataset import encode_corpus, open_dataset, read_meta, resample
from nmt.errors import DataError
from nmt.symbols import EOS
from nmt.text import write_lines
from nmt.tokenizer import load_tokenizers, train_bpe

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
    train_bpe(root, BpeConfig(vocab_size=320, coverage=1.0), ("en", "zh"), root / "bpe")
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
    monkeypatch.setattr(dataset, "WINDOW", 7)
    parts = encoded(folders, tmp_path / "parts")
    assert read_meta(whole) == read_meta(parts)


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


def test_nothing_left_to_train_on_is_refused(folders, tmp_path):
    with pytest.raises(DataError, match=r"no train pair .* is left"):
        encoded(folders, tmp_path / "none", max_tokens=2)


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


def test_sampled_pieces_spell_the_same_text_and_follow_the_seed(folders, tmp_path):
    plain = open_dataset(encoded(folders, tmp_path / "e"), "train", "en", "zh")
    tokenizers = load_tokenizers(folders[1], "en", "zh")
    first, again, other = (resample(plain, (ENGLISH, CHINESE), tokenizers, 0.3, seed, 512) for seed in (1, 1, 2))
    for side, lines, tokenizer in (("src", ENGLISH, tokenizers[0]), ("tgt", CHINESE, tokenizers[1])):
        column = getattr(first, side)
        assert tokenizer.decode([column[i].tolist() for i in range(len(first))]) == lines
        assert np.array_equal(column.ids, getattr(again, side).ids)
        assert not np.array_equal(column.ids, getattr(other, side).ids)
    assert first.src.lengths.sum() > plain.src.lengths.sum()


def test_a_pair_that_sampling_makes_too_long_keeps_its_plain_pieces(folders, tmp_path):
    plain = open_dataset(encoded(folders, tmp_path / "e"), "train", "en", "zh")
    tokenizers = load_tokenizers(folders[1], "en", "zh")
    free = resample(plain, (ENGLISH, CHINESE), tokenizers, 0.5, 1, 512)
    lengths = np.maximum(free.src.lengths, free.tgt.lengths)
    bound = int(np.median(lengths))
    bounded = resample(plain, (ENGLISH, CHINESE), tokenizers, 0.5, 1, bound)
    for i in range(len(plain)):
        expected = free if lengths[i] <= bound else plain
        assert np.array_equal(bounded.src[i], expected.src[i])
        assert np.array_equal(bounded.tgt[i], expected.tgt[i])
