"""Text that is not as it should be, given to commands as a shell gives it: every line is answered, none moves."""

import hashlib
import json
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest

from little import KNOWN, Ended, nmt, nmt_process, write_run
from nmt.io import read_lines
from nmt.runs.identity import FORMAT

RUN, FLED = "Run!", "快跑！"
CAT, SAT = "The cat sat on the mat.", "猫坐在垫子上。"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("运行 1") / "模型")


def translate(run: Path, text: bytes, *words: str) -> Ended:
    return nmt("translate", "--run", str(run), *words, stdin=text)


# ── one odd line among good ones ────────────────────────────────────────────────────────────────────────────────────

BLANK = {
    "empty": b"",
    "spaces": b"   ",
    "TAB": b"\t",
    "CR": b"\r",
    "CR and spaces": b" \r \r",
    "U+3000": "\u3000".encode(),
    "ZWSP": "\u200b\u200b".encode(),
    "NUL": b"\x00",
    "BOM": "\ufeff".encode(),
    "U+2028": "\u2028".encode(),
    "soft hyphen": "\xad".encode(),
}
SAME_AS_RUN = {
    "CRLF": b"Run!\r",
    "BOM": "\ufeffRun!".encode(),
    "NUL around": b"\x00Run!\x00",
    "UTF-16": b"R\x00u\x00n\x00!\x00",
    "controls": b"\x01Run\x1b!",
    "spaces around": "  \u3000Run!\u200b\t".encode(),
    "full width": "Ｒｕｎ！".encode(),
    "bidi marks": "\u202eRun!\u202c".encode(),
    "entity": b"Run&#33;",
}
SAME_AS_BOOK = {
    name: f"Where is{sign}my red book?".encode()
    for name, sign in {
        "lone CR": "\r",
        "VT": "\x0b",
        "FF": "\x0c",
        "FS": "\x1c",
        "GS": "\x1d",
        "RS": "\x1e",
        "NEL": "\x85",
        "U+2028": "\u2028",
        "U+2029": "\u2029",
        "NBSP": "\xa0",
        "TAB": "\t",
        "NUL": "\x00",
        "BEL": "\x07",
        "backspace": "\x08",
    }.items()
}
ODD = {
    "invalid UTF-8": b"Run\xff\xfe!",
    "cut character": "快".encode()[:2],
    "surrogate": b"\xed\xa0\x80",
    "over-long NUL": b"\xc0\x80",
    "beyond Unicode": b"\xf5\x80\x80\x80",
    "only marks": b"?!?!?!",
    "only combining": "\u0301\u0302".encode(),
    "marks without end": ("e" + "\u0301\u0316" * 5_000).encode(),
    "emoji": "😀👍🏽".encode(),
    "private use": "\ue000".encode(),
    "noncharacter": "\uffff".encode(),
    "SentencePiece's space": "\u2581\u2581".encode(),
    "special pieces": b"<s> </s> <pad> <unk> <0x0A>",
    "Chinese as source": "我的红书在哪里？".encode(),
}
WANTED: dict[str, tuple[bytes, str | None]] = {
    **{f"blank: {name}": (line, "") for name, line in BLANK.items()},
    **{f"run: {name}": (line, FLED) for name, line in SAME_AS_RUN.items()},
    **{f"book: {name}": (line, KNOWN["Where is my red book?"]) for name, line in SAME_AS_BOOK.items()},
    **{f"odd: {name}": (line, None) for name, line in ODD.items()},
}


@pytest.mark.parametrize(("line", "wanted"), WANTED.values(), ids=WANTED)
def test_an_odd_line_gives_one_line_and_its_neighbours_stay(run: Path, line: bytes, wanted: str | None) -> None:
    ended = translate(run, b"The cat sat on the mat.\n" + line + b"\nRun!\n")
    assert ended.code == 0
    before, between, after = ended.lines
    assert (before, after) == (SAT, FLED)
    if wanted is not None:
        assert between == wanted
    assert between.isprintable()


def test_every_odd_line_at_once_comes_out_in_order(run: Path, tmp_path: Path) -> None:
    text = b"".join(line + b"\nRun!\n" for line, _ in WANTED.values())
    ended = translate(run, text)
    assert len(ended.lines) == 2 * len(WANTED) == text.count(b"\n")
    assert ended.lines[1::2] == [FLED] * len(WANTED)
    for found, wanted in zip(ended.lines[::2], [wanted for _, wanted in WANTED.values()], strict=True):
        assert wanted in (None, found)
    (tmp_path / "in").write_bytes(text)
    nmt("translate", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--run", str(run))
    assert (tmp_path / "out").read_bytes() == ended.out


def test_bytes_that_are_no_utf_8_are_told_by_line_and_cost_no_line(run: Path) -> None:
    ended = translate(run, b"Run!\nbad \xff\nRun!\nworse \xc3(\n")
    assert (ended.code, len(ended.lines)) == (0, 4)
    assert "line 2 is not UTF-8" in ended.told
    assert "line 4 is not UTF-8" in ended.told
    assert "2 not UTF-8" in ended.told
    assert "line 1" not in ended.told


# ── files whose ends are odd ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\n\n\n", ["", "", ""]),
        ("\ufeff".encode(), [""]),
        (b"Run!", [FLED]),
        (b"Run!\nRun!", [FLED, FLED]),
        (b"Run!\r\n\r\nRun!\r\n", [FLED, "", FLED]),
        ("\ufeffRun!\r\nRun!".encode(), [FLED, FLED]),
        (b"Run!\n\x00", [FLED, ""]),
        (b"Run!\n\r", [FLED, ""]),
    ],
)
@pytest.mark.parametrize("way", ["stdin", "file"])
def test_as_many_lines_come_out_as_there_are_line_feeds_and_a_rest(
    run: Path, tmp_path: Path, text: bytes, wanted: list[str], way: str
) -> None:
    if way == "stdin":
        ended = translate(run, text)
        assert (ended.code, ended.lines) == (0, wanted)
        return
    (tmp_path / "入 力").write_bytes(text)
    assert nmt("translate", str(tmp_path / "入 力"), "-o", str(tmp_path / "出 力"), "--run", str(run)).code == 0
    assert read_lines(tmp_path / "出 力") == wanted


def test_the_same_text_with_a_byte_order_mark_and_other_line_ends_scores_100(tmp_path: Path) -> None:
    (tmp_path / "hyp").write_bytes("\ufeff猫坐在垫子上。\r\n快跑！\r\n".encode())
    (tmp_path / "ref").write_bytes("猫坐在垫子上。\n快跑！".encode())
    ended = nmt("eval", str(tmp_path / "hyp"), "--ref", str(tmp_path / "ref"), "--tgt", "zh")
    assert "BLEU: 100.00" in ended.out.decode()


# ── lines that are too long ─────────────────────────────────────────────────────────────────────────────────────────

LONG = {
    "without a space": "q" * 5_000,
    "words": "mat " * 5_000,
    "one character": "好" * 5_000,
    "sentences": "The cat sat. " * 1_000,
    "an open quotation": "“" + "The cat sat. " * 1_000,
    "marks": "?!" * 2_500,
    "skin tones": "👍" + "🏽" * 5_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_source_of_five_thousand_tokens_is_one_line_and_told_by_number(run: Path, text: str) -> None:
    ended = translate(run, f"Run!\n{text}\nRun!\n".encode(), "--max-length", "4", "--greedy")
    assert ended.code == 0
    assert (ended.lines[0], len(ended.lines), ended.lines[2]) == (FLED, 3, FLED)
    assert "line 2 has" in ended.told
    assert "1 translated in parts" in ended.told


def peak(words: Sequence[str], stdin: Path, stdout: Path) -> tuple[int, int, float]:
    """Exit code of `nmt` in a process of its own, the most memory it ever held in MB, and its seconds of CPU."""
    with stdin.open("rb") as source, stdout.open("wb") as target:
        process = subprocess.Popen([sys.executable, "-m", "nmt", *words], stdin=source, stdout=target)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss // 1024, usage.ru_utime + usage.ru_stime


MEGABYTES = {"without a space": "x" * 1_000_000, "Chinese": "好" * 333_333, "words": "mat " * 250_000}


@pytest.mark.slow
def test_a_line_of_a_megabyte_costs_little_memory_and_changes_no_other(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nine = (list(KNOWN) * 2)[:9]
    words = ["translate", "--run", str(run), "--greedy", "--max-length", "8"]
    (tmp_path / "nine").write_text("".join(f"{line}\n" for line in nine), encoding="utf-8")
    code, base, _ = peak(words, tmp_path / "nine", tmp_path / "nine.out")
    assert code == 0
    wanted = read_lines(tmp_path / "nine.out")
    assert wanted == [KNOWN[line] for line in nine]
    for name, long in MEGABYTES.items():
        (tmp_path / "ten").write_text("".join(f"{line}\n" for line in [*nine[:4], long, *nine[4:]]), encoding="utf-8")
        capfd.readouterr()
        code, most, _ = peak(words, tmp_path / "ten", tmp_path / "ten.out")
        told = capfd.readouterr().err
        found = read_lines(tmp_path / "ten.out")
        assert (code, len(found)) == (0, 10), name
        assert found[:4] + found[5:] == wanted, name
        assert found[4].strip(), name
        assert "line 5 has" in told, name
        assert most <= base + 200, f"{name}: {base} MB and {most} MB"


def test_what_score_cannot_cut_is_refused_by_its_line_before_any_work(run: Path, tmp_path: Path) -> None:
    (tmp_path / "src").write_text("Run!\n" + "q" * 5_000 + "\n")
    (tmp_path / "tgt").write_text("快跑！\n快跑！\n", encoding="utf-8")
    for words, what in ((("src", "tgt"), "source"), (("tgt", "src"), "translation")):
        ended = nmt("score", *(str(tmp_path / word) for word in words), "--run", str(run))
        assert (ended.code, ended.out) == (1, b"")
        assert f"the {what} in line 2 has" in ended.told
        assert "translate.max_source_tokens" in ended.told


def test_a_prefix_that_no_translation_can_have_is_refused_by_its_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prefix").write_text("快\n" + "好" * 3_000 + "\n", encoding="utf-8")
    ended = translate(run, b"Run!\nRun!\n", "--prefix", str(tmp_path / "prefix"))
    assert (ended.code, ended.out) == (1, b"")
    assert "the prefix in line 2 has" in ended.told


# ── files that should match line by line ────────────────────────────────────────────────────────────────────────────


def test_two_files_of_unequal_length_are_refused_with_both_counts_before_any_work(run: Path, tmp_path: Path) -> None:
    for name, count in (("short", 1), ("long", 2)):
        (tmp_path / name).write_text("Run!\n" * count)
    short, long = str(tmp_path / "short"), str(tmp_path / "long")
    out = str(tmp_path / "out")
    for words in (
        ["score", short, long, "--run", str(run), "-o", out],
        ["score", long, short, "--run", str(run), "-o", out],
        ["eval", short, "--ref", long, "--tgt", "zh"],
        ["eval", long, "--ref", short, "--tgt", "zh"],
        ["eval", short, "--ref", short, "--ref", long, "--tgt", "zh"],
        ["eval", long, "--ref", long, "--src", short, "--tgt", "zh"],
        ["translate", long, "--prefix", short, "--run", str(run), "-o", out],
        ["translate", short, "--prefix", long, "--run", str(run), "-o", out],
    ):
        ended = nmt(*words)
        assert (ended.code, ended.out) == (1, b""), words
        assert "1" in ended.told, words
        assert "2" in ended.told, words
        assert sorted(path.name for path in tmp_path.iterdir()) == ["long", "short"], words


def test_a_tokenizer_of_another_training_is_refused_with_both_hashes_though_its_size_is_the_same(
    run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    model = copy / "tokenizer" / "joint.model"
    first = hashlib.sha256(model.read_bytes()).hexdigest()
    reads = {"bpe/joint.model": first}
    reads["clean/normalisation.json"] = hashlib.sha256((copy / "normalisation.json").read_bytes()).hexdigest()
    (copy / "identity.json").write_text(json.dumps({"format": FORMAT, "settings": {}, "reads": reads}))
    assert translate(copy, b"Run!\n").lines == [FLED]
    # The same pieces, two of them in each other's place.
    model.write_bytes(model.read_bytes().replace("我".encode(), b"???").replace("你".encode(), "我".encode()))
    second = hashlib.sha256(model.read_bytes()).hexdigest()
    ended = translate(copy, b"Run!\n")
    assert (ended.code, ended.out) == (1, b"")
    assert first in ended.told
    assert second in ended.told
    for broken in ("", "[]", "{}", '{"content": 3}', f'{{"format": {FORMAT}, "reads": 3}}'):
        (copy / "identity.json").write_text(broken)
        ended = translate(copy, b"Run!\n")
        assert (ended.code, ended.out) == (1, b"")
        assert "identity.json" in ended.told


# ── where output goes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_as_output_is_refused_before_any_line_is_translated(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with mock.patch("nmt.decoding.translator.Translator._search", side_effect=AssertionError("was asked to translate")):
        ended = translate(run, b"Run!\n", "-o", str(tmp_path / "out"), "--force")
    assert ended.code == 1
    assert "Is a directory" in ended.told
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_pipe_as_output_is_written_to_and_stays_a_pipe(run: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE) as reader:
        ended = translate(run, b"Run!\n", "-o", str(tmp_path / "pipe"), "--force")
        assert ended.code == 0
        assert reader.communicate(timeout=60)[0].decode() == f"{FLED}\n"
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "code", "told"), [("<&-", 0, ""), (">&-", 1, "standard output: it is closed"), ("2>&-", 0, "")]
)
def test_a_closed_stream_is_no_bug(run: Path, closed: str, code: int, told: str) -> None:
    words = [sys.executable, "-m", "nmt", "-q", "translate", "--run", str(run)]
    done = subprocess.run(
        ["sh", "-c", f'printf "Run!\\n" | "$@" {closed}', "sh", *words], capture_output=True, check=False, timeout=120
    )
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert told in done.stderr.decode()


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_translation_quietly(run: Path, tmp_path: Path) -> None:
    (tmp_path / "many").write_text("Run!\n" * 5_000)
    command = '"$@" | head -1; echo "${PIPESTATUS[0]}"'
    words = [sys.executable, "-m", "nmt", "-q", "translate", str(tmp_path / "many"), "--run", str(run), "--buffer", "1"]
    done = subprocess.run(["bash", "-c", command, "bash", *words], capture_output=True, check=False, timeout=120)
    assert done.stdout.decode().split("\n")[:2] == [FLED, "0"]
    assert done.stderr == b""


# ── answers before the next question ────────────────────────────────────────────────────────────────────────────────


def answers(process: subprocess.Popen[bytes], ask: Callable[[bytes], object]) -> list[str]:
    """The answer to each line, read before the next one is sent."""
    assert process.stdout is not None
    found = []
    for line in KNOWN:
        ask(line.encode() + b"\n")
        found.append(process.stdout.readline().decode().removesuffix("\n"))
    return found


@pytest.mark.slow
def test_a_line_in_a_pipe_is_answered_before_the_next_one_if_that_is_asked_for(run: Path) -> None:
    words = [sys.executable, "-m", "nmt", "-q", "translate", "--run", str(run), "--buffer", "1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        begun = time.monotonic()
        assert answers(process, process.stdin.write) == list(KNOWN.values())
        assert time.monotonic() - begun < 120
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_line_at_a_terminal_is_answered_before_the_next_one(run: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "nmt", "-q", "translate", "--run", str(run)]
    with subprocess.Popen(words, stdin=theirs, stdout=subprocess.PIPE, bufsize=0) as process:
        os.close(theirs)
        assert answers(process, lambda line: os.write(ours, line)) == list(KNOWN.values())
        os.write(ours, b"\x04")  # Ctrl-D
        assert process.wait(timeout=60) == 0
    os.close(ours)


# ── locales and names ───────────────────────────────────────────────────────────────────────────────────────────────

LOCALES = [
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


@pytest.mark.slow
@pytest.mark.parametrize("locale", LOCALES, ids=lambda locale: " ".join(f"{k}={v}" for k, v in locale.items()))
def test_chinese_is_right_in_any_locale_and_under_any_name(run: Path, tmp_path: Path, locale: dict[str, str]) -> None:
    (tmp_path / "入 力.txt").write_text("Run!\n他\n", encoding="utf-8")
    (tmp_path / "开 头.txt").write_text("快跑\n猫\n", encoding="utf-8")
    words = ["--run", str(run), "入 力.txt", "--prefix", "开 头.txt"]
    ended = nmt_process("translate", *words, cwd=tmp_path, **locale)
    assert ended.code == 0, ended.told
    assert ended.lines[0] == FLED
    assert ended.lines[1].startswith("猫")
    told = nmt_process("config", "check", "--set", "data.corpus=语料", cwd=tmp_path, **locale)
    assert told.out.decode() == "default: all settings are good (语料, en-zh).\n"


STREET = """
data: {corpus: 语料}
clean: {dev_size: 40, test_size: 60, sources: {来源: 数据 1/原 文.txt}}
bpe: {vocab_size: 1200}
model: {layers: 1, d_model: 32, d_ff: 64, heads: 2}
optim: {warmup_steps: 4}
train: {batch_tokens: 1000, max_steps: 4, validate_every: 4, validate_sentences: 4, save_every: 4}
runtime: {device_tokens: 1000}
translate: {beam: 1, max_length_offset: 4}
eval: {bootstrap: 0}
"""


@pytest.mark.slow
def test_the_whole_pipeline_passes_under_chinese_names_with_spaces_in_an_ascii_locale(tmp_path: Path) -> None:
    folder = tmp_path / "运行 1"
    (folder / "数据 1").mkdir(parents=True)
    mini = Path(__file__).parent.parent / "data/mini/raw/mini.txt"
    (folder / "数据 1" / "原 文.txt").write_bytes(mini.read_bytes())
    (folder / "配 方.yaml").write_text(STREET, encoding="utf-8")
    locale = LOCALES[2]
    ended = nmt_process("run", "-c", "配 方.yaml", "--name", "模型 甲", "--json", cwd=folder, **locale)
    assert ended.code == 0, ended.told
    assert json.loads(ended.out)["lines"] == 60
    assert "runs/模型 甲" in ended.told
    assert len(read_lines(folder / "runs/模型 甲/translate/test.hyp")) == 60
    assert (folder / "data" / "语料").is_dir()
    facts = json.loads(nmt_process("info", "runs/模型 甲", "--json", cwd=folder, **locale).out)
    assert (facts["corpus"], facts["recipe"], facts["run"]) == ("语料", "配 方", "runs/模型 甲")
    again = nmt_process("status", "-c", "配 方.yaml", "--name", "模型 甲", cwd=folder, **locale)
    assert again.out.decode().count(": up to date (") == 6
