"""Any bytes at all through the commands that take text: no line is lost, and nothing ends in a traceback."""

import contextlib
import encodings.aliases
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from little import KNOWN, nmt, write_run
from nmt.config import CleanConfig
from nmt.corpus import Normaliser
from nmt.corpus.cleaning import clean_chunk
from nmt.corpus.reading import Chunk
from nmt.decoding.translator import Translator
from nmt.errors import ConfigError
from nmt.io import decode_line, read_lines

LEVELS = pytest.mark.parametrize("examples", [25, pytest.param(500, marks=pytest.mark.slow)])

EDGE_CASES = [
    *(
        b"",
        b" ",
        b"\t",
        b"\t\t\t",
        b"\r",
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\x1b[0m",
    ),
    *(
        b"&amp;amp;#10;",
        b"&#0;",
        b"\x1b[0m",
        b"&#xD800;",
        b"<b",
        b"%s$",
        b"$x_1$",
        b"</s><pad>",
        b"q" * 700,
        b"?!" * 300,
    ),
    *(
        text.encode()
        for text in (
            *("\u3000", "\u200b", "a\u2028b", "\x85", "\ufeffRun!", "\u202eRun!", "e\u0301" * 40, "\u0301\u0316" * 50),
            *(
                "好" * 600,
                "“" * 90,
                "😀👍🏽" * 30,
                "ﷺ",
                "\u0130\u0131ß",
                "\U0001d173",
                "\uffff",
                "\u2581",
                "（注：",
                "臺灣",
            ),
        )
    ),
    *(line.encode() for line in KNOWN),
]
"""Lines that broke some reader, tokenizer or search once."""

LINE = st.sampled_from(EDGE_CASES) | st.binary(max_size=40) | st.text(max_size=30).map(lambda text: text.encode())
TEXT = st.tuples(st.lists(LINE, max_size=12), st.sampled_from([b"\n", b"\r\n"]), st.booleans()).map(
    lambda parts: parts[1].join(parts[0]) + (parts[1] if parts[2] else b"")
)


def count(text: bytes) -> int:
    """Lines of a text: its line feeds, and what stands after the last."""
    return text.count(b"\n") + (text[-1:] not in (b"", b"\n"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run that is loaded once: loading it is no part of what is tried here."""
    folder = write_run(tmp_path_factory.mktemp("run") / "five")
    loaded = Translator.load(folder, device="cpu")

    def load(_: Path, translate, *, device: str) -> Translator:
        loaded.settings, loaded.most_input = translate, min(translate.max_source_tokens, loaded.most)
        return loaded

    with mock.patch.object(Translator, "load", load):
        yield str(folder)


def test_an_error_that_nmt_does_not_know_goes_up() -> None:
    # What every other test here rests on.
    with mock.patch("nmt.cli.translate.read_config", side_effect=RuntimeError("a bug")), pytest.raises(RuntimeError):
        nmt("translate", "--run", "some")


# ── translate and score ─────────────────────────────────────────────────────────────────────────────────────────────


@LEVELS
def test_any_bytes_are_translated_line_by_line_in_order(run: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(text=TEXT, buffer=st.sampled_from(["1", "2", "10000"]))
    def holds(text: bytes, buffer: str) -> None:
        known = list(KNOWN)
        between = b"".join(raw + b"\n" + known[at % 5].encode() + b"\n" for at, raw in enumerate(text.split(b"\n")))
        ended = nmt("translate", "--run", run, "--buffer", buffer, stdin=between)
        assert ended.code == 0
        assert ended.lines[1::2] == [KNOWN[known[at % 5]] for at in range(text.count(b"\n") + 1)]
        assert all(line.isprintable() or not line for line in ended.lines)
        alone = nmt("translate", "--run", run, "--buffer", buffer, stdin=text)
        assert (alone.code, len(alone.lines)) == (0, count(text))

    holds()


SET = {
    "translate.alpha": ["0", "0.6", "10", "1e-300"],
    "translate.beam": ["1", "3", "50"],
    "translate.length_penalty": ["gnmt", "power"],
    "translate.max_length_offset": ["0", "5"],
    "translate.max_source_tokens": ["2", "3", "40"],
    "translate.batch_tokens": ["1", "77", "2147483647"],
}
OPTIONS = {
    "--n-best": ["0", "1", "2", "60"],
    "--temperature": ["0", "0.001", "0.5", "1000", "1e9", "nan", "inf", "-1"],
    "--top-k": ["-1", "0", "1", "399", "401", "9" * 30],
    "--top-p": ["0", "1e-300", "0.000001", "0.5", "1", "nan"],
    "--seed": ["-1", "0", "9" * 60],
    "--max-length": ["-1", "0", "1", "9" * 30],
    "--buffer": ["0", "1", "3"],
    "--device": ["cpu", "auto", "cuda:99", "meta", "xla", "mps:3", "", "cpu:0"],
}
WORDS = st.tuples(
    st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in OPTIONS.items()}),
    st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in SET.items()}),
    st.sets(st.sampled_from(["--greedy", "--sample", "--scores"])),
).map(
    lambda parts: [
        *(word for item in parts[0].items() for word in item),
        *(word for name, value in parts[1].items() for word in ("--set", f"{name}={value}")),
        *sorted(parts[2]),
    ]
)


@LEVELS
def test_any_options_give_a_translation_or_a_refusal(run: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(words=WORDS, text=TEXT)
    def holds(words: list[str], text: bytes) -> None:
        ended = nmt("translate", "--run", run, *words, stdin=text)
        assert ended.code in (0, 2), ended.told
        if ended.code == 0 and not {"--scores", "--n-best"} & set(words):
            assert len(ended.lines) == count(text)
        if ended.code == 2:
            assert ended.out == b""
            assert ended.told.strip()

    holds()


@LEVELS
def test_any_two_files_are_scored_or_refused(run: str, tmp_path: Path, examples: int) -> None:
    @settings(max_examples=examples)
    @given(texts=st.tuples(TEXT, TEXT) | TEXT.map(lambda text: (text, text)), prefix=st.booleans())
    def holds(texts: tuple[bytes, bytes], prefix: bool) -> None:
        for name, text in zip("ab", texts, strict=True):
            (tmp_path / name).write_bytes(text)
        a, b = (str(tmp_path / name) for name in "ab")
        for words in (
            ["score", a, b, "--run", run],
            ["translate", a, "--prefix", b, "--run", run],
            ["eval", a, "--ref", b, "--tgt", "zh", "--set", "eval.bootstrap=0"],
        ):
            ended = nmt(*words)
            assert ended.code in (0, 1), ended.told
            if ended.code == 0 and words[0] != "eval":
                assert len(ended.lines) == count(texts[0])

    holds()


# ── clean ───────────────────────────────────────────────────────────────────────────────────────────────────────────

GOOD = [f"Number {n} is here.\t第{n}号在这里。" for n in range(60)]
SIZES = ["--set", "clean.dev_size=2", "--set", "clean.test_size=2"]


def clean(folder: Path, corpus: bytes, *words: str) -> tuple[int, dict[str, object]]:
    """Exit code of `nmt clean` on a corpus, and its report."""
    raw = folder / "data" / "语料" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    (raw / "原 文.txt").write_bytes(corpus)
    with contextlib.chdir(folder):
        ended = nmt("clean", "-c", "base", "--set", "data.corpus=语料", *SIZES, *words, "--json")
    assert ended.code in (0, 1, 2)
    if ended.code:
        assert (ended.out, bool(ended.told.strip())) == (b"", True)
        return ended.code, {}
    return 0, json.loads(ended.out)


@LEVELS
def test_any_rows_among_good_ones_are_kept_or_dropped_and_counted(tmp_path: Path, examples: int) -> None:
    @settings(max_examples=examples)
    @given(rows=st.lists(st.lists(LINE, min_size=1, max_size=4).map(b"\t".join), max_size=12), seed=st.integers(0, 9))
    def holds(rows: list[bytes], seed: int) -> None:
        lines = [*rows, *(line.encode() for line in GOOD)]
        random.Random(seed).shuffle(lines)
        text = b"\n".join(lines)
        code, report = clean(tmp_path, text)
        if code:  # More than one line in a hundred is not UTF-8.
            with pytest.raises(UnicodeDecodeError):
                text.decode()
            return
        assert report["input"] == count(text)
        assert report["input"] == report["kept"] + sum(why["rows"] for why in report["dropped"].values())
        assert report["kept"] == report["further_references"] + sum(report["sets"].values())

    holds()


@LEVELS
def test_any_file_is_cleaned_or_refused(tmp_path: Path, examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        text=TEXT | st.binary(max_size=300), encoding=st.sampled_from(["utf-8", "gb18030", "big5", "utf-7", "latin-1"])
    )
    def holds(text: bytes, encoding: str) -> None:
        clean(tmp_path, text, "--encoding", encoding)

    holds()


ENCODINGS = sorted({*encodings.aliases.aliases.values(), "idna", "punycode", "unicode_escape", "undefined", "no such"})


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_encoding_is_refused_or_reads_any_bytes(encoding: str) -> None:
    try:
        wanted = CleanConfig(encoding=encoding)
    except ConfigError:
        return
    draw = random.Random(encoding)
    lines = [draw.randbytes(draw.randrange(60)).replace(b"\n", b"") for _ in range(40)]
    lines += [b"+AAo-+AAk-x+AAo-", b"\\u000a\\ud800\t\\x0a", b"~{<:\t~~", b"\x1b$B\t\x1b(B", *EDGE_CASES]
    for line in lines:
        assert isinstance(decode_line(line, first=False, encoding=encoding)[0], str)
    found = clean_chunk(
        Chunk(0, 2, [(line + b"\t" + line + b"\t" + line,) for line in lines]),
        wanted,
        Normaliser("simplified", {"en": False, "zh": True}),
        ("x",),
    )
    assert found.counts["input"] == len(lines) == found.kept.count(b"\n") + found.rejected.count(b"\n")
    assert all(row.count(b"\t") == 4 for row in (found.kept + found.rejected).split(b"\n")[:-1])


# ── one very long line, very many short ones ────────────────────────────────────────────────────────────────────────


def test_a_line_of_a_megabyte_is_dropped_by_its_length_and_counted(tmp_path: Path) -> None:
    long = ["x" * 1_000_000 + "\t好", "word " * 200_000 + "\t" + "字" * 300, "Here.\t" + "好" * 333_333]
    marks = "e" + "\u0301\u0316" * 250_000 + "\t好"
    rows = [*GOOD[:20], long[0], *GOOD[20:40], *long[1:], marks, *GOOD[40:]]
    code, report = clean(tmp_path, "\n".join(rows).encode())
    assert code == 0
    assert report["input"] == len(GOOD) + 4
    assert report["dropped"]["length"]["rows"] == 3
    assert report["kept"] - report["dropped"].get("no_han", {"rows": 0})["rows"] in (len(GOOD), len(GOOD) + 1)
    (out,) = (tmp_path / "data" / "语料").glob("clean-*")
    assert max(path.stat().st_size for path in out.iterdir() if path.name != "rejected.tsv") < 100_000
    for part in ("train", "dev", "test"):
        assert len(read_lines(out / f"{part}.en")) == len(read_lines(out / f"{part}.zh")) == report["sets"][part]


STUB = """
import resource, sys
from pathlib import Path
from nmt.decoding.search import Hypothesis
from nmt.decoding.files import translate_file
from nmt.decoding.translator import Translator
translator = Translator.load(sys.argv[1], device="cpu")
answer = Hypothesis(tuple(translator.tgt_tokenizer.encode(["快跑！"])[0]), 0.0, 0.0, True)
translator._search = lambda parts, options: [[answer]] * len(parts)
translate_file(translator, sys.argv[2], sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_a_million_lines_take_no_more_memory_than_twenty_thousand(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "five")
    peaks = []
    for lines in (20_000, 1_000_000):
        with open(tmp_path / "in", "wb") as stream:
            stream.writelines(b"Run to %d!\n" % number for number in range(lines))
        words = [sys.executable, "-c", STUB, *map(str, (folder, tmp_path / "in", tmp_path / "out"))]
        peaks.append(int(subprocess.run(words, capture_output=True, check=True, timeout=1200).stdout))
        with open(tmp_path / "out", "rb") as stream:
            assert sum(line == "快跑！\n".encode() for line in stream) == lines
    assert peaks[1] <= peaks[0] + 50
