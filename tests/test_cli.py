"""The command line as a shell sees it: exit codes, what goes to which stream, signals, pipes."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from little import write_run
from nmt.cli import COMMANDS, _general_first, app
from nmt.distributed import launcher

ROOT = Path(__file__).parent.parent
STREET = ["fetch", "clean", "bpe", "encode", "train", "translate", "eval", "score", "run", "status", "plan", "average",
          "info", "doctor", "config"]  # fmt: skip


def nmt(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `nmt` as a user does, in an empty folder unless told otherwise."""
    return subprocess.run(
        [sys.executable, "-m", "nmt", *words],
        capture_output=True,
        encoding="utf-8",
        cwd=cwd,
        env=os.environ | environment,
        check=False,
        timeout=60,
    )


def test_help_lists_the_commands_in_street_order(tmp_path: Path) -> None:
    done = nmt("-h", cwd=tmp_path)
    assert [line.split()[0] for line in done.stdout.split("Commands:")[1].strip().split("\n")] == STREET
    assert done.returncode == 0
    assert [*COMMANDS, "config"] == STREET


def test_help_answers_in_half_a_second(tmp_path: Path) -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        nmt("--help", cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Time of that process alone, so that a busy machine doesn't matter.
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


def test_every_command_tells_what_it_does_in_a_line_that_is_not_cut(tmp_path: Path) -> None:
    lines = nmt("--help", cwd=tmp_path).stdout.split("Commands:")[1].strip().split("\n")
    assert all(line.endswith(".") and not line.endswith("...") for line in lines), lines


@pytest.mark.parametrize("name", STREET)
def test_every_option_has_a_sentence(name: str) -> None:
    group: Any = typer.main.get_command(app)
    for command in getattr(group.commands[name], "commands", {name: group.commands[name]}).values():
        for parameter in command.params:
            assert str(parameter.help).endswith("."), f"nmt {name} {parameter.name}"


def test_the_version_is_printed(tmp_path: Path) -> None:
    assert re.fullmatch(r"nmt \d+\.\d+\.\d+\n", nmt("--version", cwd=tmp_path).stdout)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["config", "check", "--set", "optim.batch_token=1"], 2, "did you mean train.batch_tokens?"),
        (["train", "-c", "demmo"], 2, "did you mean demo.yaml?"),
        (["run", "-c", "base", "--set", "model.heads=7"], 2, "model.heads"),
        (["run"], 2, "which recipe? Give it with -c FILE: one of base-modern.yaml, base.yaml"),
        (["train", "--name", "mine"], 2, "demo.yaml"),
        (["status", "-c", "cmn"], 1, "`nmt fetch cmn` fills it"),
        (["run", "-c", "cmn", "--set", "data.corpus=news"], 1, "`nmt fetch news --from PATH` fills it"),
        (["info"], 1, "no finished training"),
        (["translate", "--run", "runs/none"], 1, "runs/none"),
        (["average", "runs/none"], 1, "runs/none"),
        (["run", "-c", "demo", "--upto", "trian"], 2, "there is no stage trian"),
        (["train", "--processes", "-1"], 2, "--processes"),
        (["trian"], 2, "trian"),
        (["train", "--nonsense"], 2, "--nonsense"),
        (["fetch"], 2, "CORPUS"),
    ],
)
def test_what_goes_wrong_is_told_in_few_lines_on_stderr(words: list[str], code: int, told: str, tmp_path: Path) -> None:
    done = nmt(*words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert len(done.stderr.splitlines()) <= 4
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path) -> None:
    for words in (["--debug", "info"], ["info", "--debug"]):
        assert "Traceback" in nmt(*words, cwd=tmp_path).stderr


def test_general_options_go_first_but_not_those_after_two_dashes() -> None:
    assert _general_first(["train", "-q", "-c", "x", "--debug"]) == ["-q", "--debug", "train", "-c", "x"]
    assert _general_first(["eval", "--", "-q"]) == ["eval", "--", "-q"]


def test_quiet_keeps_data_and_drops_the_log(tmp_path: Path) -> None:
    loud, quiet = (nmt("plan", *words, "-c", "cmn", cwd=tmp_path) for words in ([], ["-q"]))
    assert loud.stderr != ""
    assert quiet.stderr == ""
    assert quiet.stdout == loud.stdout != ""


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "nmt", "config", "show"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert process.stdout is not None
    process.stdout.close()
    _, told = process.communicate(timeout=60) if process.stderr is None else (None, process.stderr.read())
    assert process.wait(timeout=60) == 0
    assert told == b""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["config", "show"], ["config", "check"], ["--help"], ["eval", "a", "--ref", "a",
                                   "--tgt", "zh"], ["status", "-c", "demo", "--json"]])  # fmt: skip
def test_a_stdout_that_is_full_or_closed_is_named_in_one_line(
    words: list[str], unbuffered: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("他走了。\n", encoding="utf-8")
    (tmp_path / "data/mini/raw").mkdir(parents=True)
    (tmp_path / "data/mini/raw/mini.txt").write_text("One.\t一。\n", encoding="utf-8")
    command, environment = [sys.executable, "-m", "nmt", *words], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    for to, what in ((">/dev/full", "No space left on device"), (">&-", "it is closed")):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {to}', "sh", *command],
            stderr=subprocess.PIPE,
            encoding="utf-8",
            cwd=tmp_path,
            env=environment,
            check=False,
        )
        assert (done.returncode, done.stderr) == (1, f"standard output: {what}. (--debug tells more.)\n")


def test_other_libraries_log_nothing_but_warnings(tmp_path: Path) -> None:
    program = (
        "import logging, nmt.cli\n"
        "def say():\n"
        "    for name in ('sacrebleu', 'other', 'nmt'):\n"
        "        logging.getLogger(name).info('%s works', name)\n"
        "        logging.getLogger(name).warning('%s warns', name)\n"
        "nmt.cli.app.command('say')(say)\n"
        "nmt.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "say"], capture_output=True, text=True, check=False)
    assert done.stderr.split("\n") == ["sacrebleu warns", "other warns", "nmt works", "nmt warns", ""]


def test_scoring_and_comparing_say_nothing_on_stderr(tmp_path: Path) -> None:
    for name, text in {"a": "他走了。\n天气很好。\n", "b": "他走。\n天气好。\n"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for words in (["a"], ["a", "b"]):
        done = nmt("eval", *words, "--ref", "b", "--tgt", "zh", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "tgt", "code", "fix"),
    [
        ("你好。", "cn", 2, "--tgt: 'cn' is not a language code; did you mean zh?"),
        ("你好。", "chs", 2, "did you mean zh-Hans?"),
        ("你好。", "Chinese", 2, "did you mean zh?"),
        ("你好。", "en", 1, "e.g. zh"),
        ("こんにちは。", "zh", 1, "e.g. ja"),
        ("Hello there.", "ja", 1, "Latin characters"),
    ],
)
def test_a_language_that_would_make_a_score_wrong_is_refused_with_the_fix(
    text: str, tgt: str, code: int, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text(f"{text}\n", encoding="utf-8")
    done = nmt("eval", "a", "--ref", "a", "--tgt", tgt, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert fix in done.stderr


def test_chinese_comes_out_whole_in_a_c_locale(tmp_path: Path) -> None:
    done = nmt("config", "check", "--set", "data.corpus=语料", cwd=tmp_path, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert "语料" in done.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_its_exit_code_and_without_a_traceback(number: int, code: int, tmp_path: Path) -> None:
    program = (
        "import signal, sys, time, nmt.cli\n"
        # Who starts the tests in the background may have told them to ignore Ctrl-C, and children inherit that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def wait():\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "nmt.cli.app.command('wait')(wait)\n"
        "nmt.cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"Traceback" not in told


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    program = (
        "import errno, nmt.cli\n"
        "def fill():\n    raise OSError(errno.ENOSPC, 'No space left on device', 'data/big')\n"
        "nmt.cli.app.command('fill')(fill)\n"
        "nmt.cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "fill"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    assert re.fullmatch(
        r"data/big: No space left on device; [\d,]+ bytes are free there\. \(--debug tells more\.\)\n", done.stderr
    )


def test_a_cpu_trains_in_one_process_a_core_unless_told_otherwise(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(launcher, "cores", lambda: 6)
    assert launcher.processes_for("cpu", 25_000) == 6
    assert launcher.processes_for("cpu", 1024) == 4
    assert launcher.processes_for("cpu", 100) == 1
    assert launcher.processes_for("cuda", 25_000) == 1
    monkeypatch.setattr(launcher, "cores", lambda: 64)
    assert launcher.processes_for("cpu", 25_000) == launcher.MOST
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun's, around a single process
    assert launcher.processes_for("cpu", 25_000) == 1
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert launcher.processes_for("cpu", 25_000) == 1


@pytest.mark.parametrize("name", ["nvidia0", "nvhost-gpu", "dxg", "kfd"])
def test_a_gpu_of_any_maker_is_seen_without_torch(tmp_path: Path, name: str) -> None:
    for other in ("nvidiactl", "null", "dri"):
        (tmp_path / other).touch()
    assert not launcher.has_gpu(tmp_path)
    (tmp_path / name).touch()
    assert launcher.has_gpu(tmp_path)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000\n", 8),
        ("100000 100000\n", 1),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("6400000 100000\n", 8),
    ],
)
def test_a_container_has_no_more_cores_than_its_share_of_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(launcher, "QUOTA", tmp_path / "cpu.max")
    assert launcher.cores() == 8
    (tmp_path / "cpu.max").write_text(quota)
    assert launcher.cores() == expected


def test_processes_started_within_torchrun_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    code = "import os, sys; sys.exit('TORCHELASTIC_USE_AGENT_STORE' in os.environ)"
    assert launcher.launch(["-c", code], 2) == 0


def test_processes_that_were_started_together_do_not_make_data(tmp_path: Path) -> None:
    (tmp_path / "data/mini/raw").mkdir(parents=True)
    (tmp_path / "data/mini/raw/mini.txt").write_text("One.\t一。\n", encoding="utf-8")
    several = {"WORLD_SIZE": "2", "RANK": "0"}
    done = nmt("train", "-c", "demo", "--set", "train.seed=2", cwd=tmp_path, **several)
    assert done.returncode == 2
    assert "nmt run -c demo --set train.seed=2 --upto encode" in done.stderr
    done = nmt("run", "-c", "demo", cwd=tmp_path, **several)
    assert done.returncode == 2
    assert "nmt run -c demo --processes 2" in done.stderr
    assert not list((tmp_path / "data/mini").glob("clean-*"))


def test_numbers_come_as_json_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "data/mini/raw").mkdir(parents=True)
    (tmp_path / "data/mini/raw/mini.txt").write_text("One.\t一。\n", encoding="utf-8")
    states = json.loads(nmt("status", "-c", "demo", "--json", cwd=tmp_path).stdout)
    assert [state["stage"] for state in states] == ["clean", "bpe", "encode", "train", "translate", "eval"]
    assert states[0]["state"] == "missing"
    assert json.loads(nmt("plan", "-c", "base", "--json", cwd=tmp_path).stdout)["parameters"]["total"] > 4e7
    assert json.loads(nmt("config", "show", "--json", cwd=tmp_path).stdout)["model"]["d_model"] == 512


def test_info_as_json_has_names_and_numbers_and_for_people_the_same(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/five")
    scores = {
        "bleu": {"name": "BLEU", "value": 31.25, "mean": None, "interval": None, "signature": "nrefs:1|tok:zh"},
        "ter": {"name": "TER", "value": 50.5, "mean": 50.1, "interval": 2.5, "signature": "nrefs:1|tok:tercom"},
        "strange": {"name": "X"},
        "stranger": 3,
    }
    (run / "eval").mkdir()
    (run / "eval/scores.json").write_text(json.dumps({"scores": scores}))
    facts = json.loads(nmt("info", str(run), "--json", cwd=tmp_path).stdout)
    assert facts["test"] == {"bleu": scores["bleu"], "ter": scores["ter"]}
    assert all(re.fullmatch("[a-z_]+", name) for name in facts)
    assert {"best_dev_score", "best_step", "final_model"} < facts.keys()
    shown = nmt("info", str(run), cwd=tmp_path).stdout
    assert "31.25 (nrefs:1|tok:zh)" in shown
    assert "best dev score" in shown
    for content in ('{"scores": 3}', '{"scores": [1]}', "[]", "no JSON"):
        (run / "eval/scores.json").write_text(content)
        assert json.loads(nmt("info", str(run), "--json", cwd=tmp_path).stdout)["test"] == {}


def test_completion_is_offered(tmp_path: Path) -> None:
    done = nmt(cwd=tmp_path, _NMT_COMPLETE="source_bash")
    assert "_nmt_completion" in done.stdout


def test_scores_are_compared_with_earlier_ones_of_the_same_set_only(tmp_path: Path) -> None:
    texts = {"hyp": "你好吗？\n我很好。\n", "ref": "你好吗？\n我很好。\n", "other": "他好吗？\n我很好。\n"}
    for name, text in {**texts, "src": "How are you?\nI am fine.\n"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    words = ["eval", "hyp", "--src", "src", "--tgt", "zh", "--set", "eval.bootstrap=0"]
    earlier = nmt(*words, "--ref", "ref", "--json", cwd=tmp_path)
    (tmp_path / "scores.json").write_text(earlier.stdout, encoding="utf-8")
    same = nmt(*words, "--ref", "ref", "--against", "scores.json", cwd=tmp_path)
    assert same.returncode == 0
    assert "BLEU against scores.json: 100.00 -> 100.00" in same.stdout
    other = nmt(*words, "--ref", "other", "--against", "scores.json", cwd=tmp_path)
    assert other.returncode == 1
    assert "can't be compared: their references differ" in other.stderr
    (tmp_path / "split").write_text('{"split": {}}')
    (tmp_path / "words").write_text(json.dumps(json.loads(earlier.stdout) | {"scores": {"bleu": {"signature": "x"}}}))
    for other_file in ("hyp", "split", "words", "."):
        nothing = nmt(*words, "--ref", "ref", "--against", other_file, cwd=tmp_path)
        assert nothing.returncode in (1, 2)
        assert "no scores.json" in nothing.stderr or "their signatures" in nothing.stderr


def test_the_encoding_of_raw_files_can_be_named(tmp_path: Path) -> None:
    raw = tmp_path / "data" / "old" / "raw"
    raw.mkdir(parents=True)
    rows = [f"Sentence number {n} is here.\t这是第{n}个句子。\n" for n in range(60)]
    (raw / "old.txt").write_bytes("".join(rows).encode("gb18030"))
    sizes = ["-c", "base", "--set", "data.corpus=old", "--set", "clean.dev_size=2", "--set", "clean.test_size=2"]
    refused = nmt("clean", *sizes, cwd=tmp_path)
    assert refused.returncode == 1
    assert "--encoding" in refused.stderr
    assert nmt("clean", *sizes, "--encoding", "gb18030", cwd=tmp_path).returncode == 0
