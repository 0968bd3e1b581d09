"""The scripts: the check of a GPU runs on a CPU, and the batch job queues itself again when it should."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from nmt.distributed.launcher import family
from nmt.io import write_lines
from nmt.special_tokens import EOS

SCRIPTS = Path(__file__).parent.parent / "scripts"
SHELL = sorted([*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch")])


@pytest.fixture(scope="module")
def check_gpu():
    """The main function of scripts/check_gpu.py."""
    sys.path.insert(0, str(SCRIPTS))
    import check_gpu

    yield check_gpu.main
    sys.path.remove(str(SCRIPTS))


def results(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").split("\n") if line]


# ── shell ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_every_shell_script_parses_and_stops_at_an_unset_variable(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=True).stderr == ""
    options = [line for line in script.read_text(encoding="utf-8").split("\n") if line.startswith("set -")]
    assert "u" in "".join(options)


# ── the check of a GPU, on a CPU ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "part",
    ["correct", "bfloat16", "decode", "pairs", "resume", pytest.param("speed", marks=pytest.mark.slow)],
)
def test_a_part_of_the_gpu_check_finds_nothing_wrong_on_a_cpu(check_gpu, part, tmp_path):
    assert check_gpu([part, "--device", "cpu", "--small", "--seconds", "60", "--out", str(tmp_path)]) == 0
    rows = results(tmp_path)
    assert {row["part"] for row in rows} == {part}
    assert not [row for row in rows if row["ok"] is False]
    assert rows[-1]["what"] == "done"
    table = (tmp_path / "results.md").read_text(encoding="utf-8").split("\n")
    assert len(table) == 2 + len(rows) + 1
    assert {line.count("|") for line in table[:-1]} == {5}


def test_a_difference_between_devices_is_found(check_gpu, tmp_path, monkeypatch):
    import gpu_correct
    from gpu_report import Report, Setting

    honest = gpu_correct.label_smoothed_loss
    monkeypatch.setattr(gpu_correct, "label_smoothed_loss", lambda h, w, t, s: honest(h, w, t, s * 1.01))
    at = Setting(torch.device("cpu"), True, 60, time.perf_counter(), tmp_path, tmp_path)
    gpu_correct.loss_is_cross_entropy(Report(tmp_path, "correct"), at)
    assert [row["ok"] for row in results(tmp_path)] == [False] * 3


@pytest.mark.slow
def test_two_processes_are_compared_with_one_and_end_with_the_check(check_gpu, tmp_path):
    import gpu_ranks
    from gpu_report import Setting

    at = Setting(torch.device("cpu"), True, 60, time.perf_counter(), tmp_path, tmp_path)
    expected, _ = gpu_ranks.losses_of(at.world, True, compiled=False)
    (one, weights), (other, same) = gpu_ranks.together(at, tmp_path, compiled=False)
    assert one == other == pytest.approx(expected, rel=1e-5)
    assert weights == same
    with pytest.raises(TimeoutError, match="all the time that was left"):
        gpu_ranks.together(replace(at, seconds=-1e9), tmp_path / "none", compiled=False)


def test_the_loop_that_is_measured_is_that_of_nmt_train_with_the_settings_of_the_recipe(
    check_gpu, tmp_path, monkeypatch
):
    import gpu_speed
    from gpu_report import Setting, recipe, synthetic

    at = Setting(torch.device("cpu"), True, 60, time.perf_counter(), tmp_path, tmp_path)
    ran = []
    loop = gpu_speed.training.loop
    monkeypatch.setattr(gpu_speed.training, "loop", lambda trainer, *rest: ran.append(trainer) or loop(trainer, *rest))
    config = recipe("base.yaml", "train.batch_tokens=600", "train.validate_sentences=0", tiny=True)
    measured = gpu_speed.Training(at, config, synthetic(300, at.vocab), tmp_path)
    assert [measured.take(steps)["steps"] for steps in (3, 2)] == [3, 2]
    assert [trainer.config.train.max_steps for trainer in ran] == [3, 5]
    meant = ran[0].config
    assert (meant.train.precision, meant.runtime.device_tokens) == ("float32", 4096), "what auto is on a CPU"
    assert measured.first.time is not None
    assert not (tmp_path / "checkpoints").exists()


def test_the_lines_that_are_translated_have_the_tokens_of_synthetic_sources(check_gpu, tmp_path):
    from gpu_report import Setting, synthetic
    from gpu_speed import Decoding, Numbers

    at = Setting(torch.device("cpu"), True, 60, time.perf_counter(), tmp_path, tmp_path)
    rows = Numbers(at.vocab).encode(Decoding(at, 50).lines)
    assert [len(row) + 1 for row in rows] == synthetic(50, at.vocab, seed=5).src.lengths.tolist()
    translator = Decoding(at, 50).translator()
    found = translator.translate(Decoding(at, 50).lines[:9])
    assert [len(text.split()) for text in found] == [len(row) for row in rows[:9]], "none ends by itself"
    assert translator.batch_tokens == 4096


def test_synthetic_pairs_have_the_lengths_of_sentences_and_end_in_eos(check_gpu):
    from gpu_report import synthetic

    data = synthetic(20_000, 300)
    for column in (data.src, data.tgt):
        lengths = column.lengths
        assert lengths.min() >= 2
        assert lengths.max() <= 150
        assert lengths.mean() == pytest.approx(25, abs=1)
    for column, rows in zip((data.src, data.tgt), data.take(np.arange(50)), strict=True):
        for length, row in zip(column.lengths, rows, strict=False):
            assert row[length - 1] == EOS
            assert ((row[: length - 1] > EOS) & (row[: length - 1] < 300)).all()


def test_training_is_skipped_with_a_reason_where_no_data_were_brought(check_gpu, tmp_path):
    assert check_gpu(["train", "--device", "cpu", "--tiny", "--data", str(tmp_path), "--out", str(tmp_path)]) == 0
    skipped = results(tmp_path)[0]
    assert skipped["what"] == "skipped"
    assert "nmt encode -c cmn.yaml" in skipped["value"]


@pytest.fixture(scope="module")
def brought(tmp_path_factory) -> Path:
    """What `nmt encode` makes of a small corpus with the settings of the tiny training."""
    rng = np.random.default_rng(0)
    words, signs = ["red", "green", "book", "cup", "three", "and", "tea", "my"], "红绿书杯三和茶我"
    rows = [rng.integers(0, 8, rng.integers(1, 9)) for _ in range(400)]
    home = tmp_path_factory.mktemp("brought")
    raw = home / "data" / "cmn" / "raw"
    raw.mkdir(parents=True)
    write_lines(raw / "cmn.txt", [f"{' '.join(words[i] for i in r)}\t{''.join(signs[i] for i in r)}" for r in rows])
    changes = ("bpe.vocab_size=300", "clean.dev_size=9", "clean.test_size=9")
    command = [sys.executable, "-m", "nmt", "-q", "encode", "-c", "cmn.yaml"]
    command += [word for change in changes for word in ("--set", change)]
    subprocess.run(command, cwd=home, check=True, stdout=subprocess.DEVNULL)
    return home / "data" / "cmn"


def test_a_tiny_training_on_brought_data_needs_neither_opencc_nor_an_installed_nmt(
    check_gpu, brought, tmp_path, monkeypatch
):
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setitem(sys.modules, "opencc", None)
    monkeypatch.setattr(metadata, "version", missing)
    assert check_gpu(["train", "--device", "cpu", "--tiny", "--data", str(brought), "--out", str(tmp_path)]) == 0
    score = next(row for row in results(tmp_path) if row["what"] == "test BLEU")
    assert 0 <= score["value"] <= 100
    assert "tok:zh" in score["unit"]
    assert (tmp_path / "train-metrics.jsonl").exists()


def test_only_data_that_belong_together_are_taken(check_gpu, brought, tmp_path):
    from gpu_train import brought as find

    home = shutil.copytree(brought, tmp_path / "cmn")
    clean, bpe, encode = find(home, 300)
    assert (clean.name[:5], bpe.name[:3], encode.name[:6]) == ("clean", "bpe", "encode")
    assert find(home, 301) is None
    with (clean / "train.en").open("ab") as stream:
        stream.write(b"one more line\n")
    assert find(home, 300) is None


def test_the_shell_runs_the_named_parts_and_tells_of_a_failure(tmp_path):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$2 $*" >>"$OUT/results.md"\n[ "$2" != speed ]\n')
    fake.chmod(0o755)
    environment = os.environ | {"PYTHON": str(fake), "OUT": str(tmp_path / "out"), "PARTS": "correct speed decode"}
    script = [SCRIPTS / "check_gpu.sh", "--device", "cpu"]
    ran = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert [line.split()[0] for line in ran.stdout.split("\n") if line] == ["correct", "speed", "decode"]
    assert ran.stderr.startswith("speed: exit code 1")
    assert "--device cpu" in ran.stdout


def test_all_parts_together_stay_under_eight_minutes():
    shell = (SCRIPTS / "check_gpu.sh").read_text(encoding="utf-8")
    limits = dict(item.strip("[]").split("]=") for item in shell.split("limit=(")[1].split(")")[0].split())
    assert sum(map(int, limits.values())) < 480
    named = shell.split("${PARTS:-")[1].split("}")[0].split()
    assert sorted(named) == sorted(limits)


# ── the batch job ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def queue(tmp_path) -> Path:
    """A folder to run the job in, with commands that only note how they were called."""
    (tmp_path / "bin").mkdir()
    bodies = {
        "nmt": "",
        "torchrun": "",
        "srun": 'mkdir -p runs/big; [ -z "$STATE" ] || echo "{\\"state\\": \\"$STATE\\"}" >runs/big/status.json\n'
        'trap "exit 143" TERM\n[ -z "$LASTS" ] || { sleep "$LASTS" & wait $!; }',
        "scontrol": '[ "$1" != show ] || printf "node7\\nnode8\\n"',
    }
    for name, body in bodies.items():
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/bash\necho "{name} $*" >>calls\n{body}\n')
        command.chmod(0o755)
    return tmp_path


def job(folder: Path, **environment: str) -> subprocess.Popen:
    defaults = {"SLURM_JOB_ID": "41", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]", "STATE": "", "LASTS": ""}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    words = ["bash", str(SCRIPTS / "train_slurm.sbatch"), "big.yaml", "big", "--set", "train.seed=2"]
    return subprocess.Popen(words, cwd=folder, env=os.environ | defaults | environment | {"PATH": path})


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split("\n")[:-1]


def test_a_finished_training_is_scored_and_not_queued_again(queue):
    assert job(queue, STATE="finished").wait(20) == 0
    assert calls(queue) == [
        "nmt run -c big.yaml --name big --set train.seed=2 --upto encode",
        "scontrol show hostnames node[7-8]",
        "srun torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 41 --rdzv-endpoint node7:20041 "
        "-m nmt train -c big.yaml --name big --set train.seed=2",
        "nmt run -c big.yaml --name big --set train.seed=2",
    ]


@pytest.mark.parametrize("state", ["failed", ""])
def test_a_training_that_failed_or_never_began_is_not_queued_again(queue, state):
    assert job(queue, STATE=state).wait(20) == 1
    assert calls(queue)[-1].startswith("srun")


@pytest.mark.parametrize("state", ["running", "preempted"])
def test_a_training_that_saved_for_a_signal_or_died_without_a_word_is_queued_again(queue, state):
    assert job(queue, STATE=state).wait(20) == 0
    assert calls(queue)[-1] == "scontrol requeue 41"


def test_a_training_that_is_always_running_is_not_queued_for_ever(queue):
    assert job(queue, STATE="running", SLURM_RESTART_COUNT="50").wait(20) == 1
    assert calls(queue)[-1].startswith("srun")


def test_a_training_that_the_time_limit_ends_is_queued_again(queue):
    started = time.monotonic()
    ran = job(queue, STATE="failed", LASTS="60")
    while not (queue / "runs" / "big" / "status.json").exists():
        assert time.monotonic() - started < 20
        time.sleep(0.05)
    ran.send_signal(signal.SIGUSR1)
    assert ran.wait(20) == 0
    assert calls(queue)[-1] == "scontrol requeue 41"
    assert time.monotonic() - started < 50


def test_one_machine_makes_the_data_trains_and_scores(queue):
    path = f"{queue / 'bin'}:{os.environ['PATH']}"
    words = ["bash", str(SCRIPTS / "train_8_gpus.sh"), "base.yaml", "--name", "x"]
    subprocess.run(words, cwd=queue, env=os.environ | {"PATH": path, "GPUS": "4"}, check=True)
    assert calls(queue) == [
        "nmt run -c base.yaml --name x --upto encode",
        "torchrun --standalone --nproc-per-node 4 -m nmt train -c base.yaml --name x",
        "nmt run -c base.yaml --name x",
    ]


def test_two_nodes_meet_at_the_first_and_the_first_alone_makes_the_data(queue):
    path = f"{queue / 'bin'}:{os.environ['PATH']}"
    words = ["bash", str(SCRIPTS / "train_2_nodes.sh"), "node7", "base.yaml", "--name", "x"]
    for node in ("0", "1"):
        subprocess.run(words, cwd=queue, env=os.environ | {"PATH": path, "NODE": node, "GPUS": "4"}, check=True)
    meet = (
        "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-id nmt --rdzv-endpoint node7:29500 --max-restarts 3"
    )
    assert calls(queue) == [
        "nmt run -c base.yaml --name x --upto encode",
        f"torchrun {meet} -m nmt train -c base.yaml --name x",
        "nmt run -c base.yaml --name x",
        f"torchrun {meet} -m nmt train -c base.yaml --name x",
    ]


def ended_with(parent: subprocess.Popen, works: Callable[[list[int]], bool]) -> bool:
    """Kill a process when all that it has started works; whether nothing of it is left after that."""
    started = time.monotonic()
    while not works(found := family(parent.pid)):
        assert parent.poll() is None
        assert time.monotonic() - started < 120
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    while any(running(pid) for pid in found) and time.monotonic() - started < 180:
        time.sleep(0.1)
    left = [pid for pid in found if running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("script", ["bench.py", "bench_scaling.py"])
def test_the_trainings_of_a_bench_that_is_killed_end_with_it(paths, tmp_path, script):
    words = [*(["train"] if script == "bench.py" else []), "--processes", "2", "--updates", "1000000"]
    words += ["--split", paths.clean, "--work", tmp_path, "--rounds", "1"]
    words += [part for word in TINY for part in ("--set", word)]
    parent = subprocess.Popen([sys.executable, SCRIPTS / script, *words], stderr=subprocess.DEVNULL)
    trained = tmp_path / "runs"
    assert ended_with(parent, lambda found: len(found) >= 4 and any(trained.glob("*/metrics.jsonl")))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_tiny_trainings_of_doctor_end_with_it(tmp_path, processes):
    # Stands for nmt, so that it is there at once.
    code = "import time; from nmt.distributed.launcher import launch; " + (
        "time.sleep(900)" if processes == 1 else "launch(['-c', 'import time; time.sleep(900)'], 2)"
    )
    doctor = f"""
import sys, time
from pathlib import Path
from nmt.diagnostics.trial_runs import TrialRuns
with TrialRuns(Path({str(tmp_path)!r}), [], (sys.executable, "-c", {code!r})).training("name"):
    time.sleep(900)
"""
    parent = subprocess.Popen([sys.executable, "-c", doctor])
    assert ended_with(parent, lambda found: len(found) == (2 if processes == 1 else 4))


# ── speed ───────────────────────────────────────────────────────────────────────────────────────────────────────────

TINY = ["bpe.vocab_size=340", "bpe.character_coverage=1.0", "model.d_model=16", "model.d_ff=32",
        "train.batch_tokens=150"]  # fmt: skip


def bench(script: str, *words: str, split: Path, work: Path) -> str:
    more = [part for word in TINY for part in ("--set", word)]
    command = [sys.executable, SCRIPTS / script, *words, "--split", split, "--work", work, "--rounds", "1", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_bench_counts_the_tokens_of_an_update_and_writes_a_table(paths, tmp_path):
    shown = bench("bench.py", "train", "--updates", "2", "--warmup", "1", split=paths.clean, work=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().split("\n")[1:-1]]
    assert len(rows) == 1
    # An update holds at most batch_tokens of either side.
    assert 150 < rows[0]["tokens_update"] <= 300
    assert rows[0]["tokens_s"] > 0
    assert rows[0]["pss_mib"] > 100
    header, _, row = shown.strip().split("\n")
    assert header.count("|") == row.count("|")
    assert f"{rows[0]['tokens_s']:,.0f}" in row


@pytest.mark.slow
def test_the_bench_decodes_to_a_forced_length(paths, tmp_path):
    words = ["decode", "--forced", "3", "--limit", "5", "--batch", "64"]
    bench("bench.py", *words, split=paths.clean, work=tmp_path)
    row = json.loads((tmp_path / "decode.jsonl").read_text().split("\n")[1])
    assert row["tokens_s"] == pytest.approx(3 * row["sentences_s"])
    assert row["sentences_s"] == pytest.approx(5 / row["seconds"])


@pytest.mark.slow
def test_scaling_is_measured_with_and_without_the_exchange(paths, tmp_path):
    words = ["--processes", "1", "2", "--accumulate", "1", "--tokens", "80", "--updates", "2", "--warmup", "1"]
    shown = bench("bench_scaling.py", *words, split=paths.clean, work=tmp_path)
    assert [line.split("|")[1].strip() for line in shown.strip().split("\n")[2:]] == ["1", "2"]


@pytest.mark.slow
def test_the_bench_of_the_host_measures_each_corpus_and_how_it_grows():
    words = ["--pairs", "2000", "6000", "--steps", "3", "--device-ms", "1", "--json"]
    command = [sys.executable, str(SCRIPTS / "bench_host.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    assert [row["pairs"] for row in found["corpora"]] == [2000, 6000]
    first, last = found["corpora"]
    for row in (first, last):
        assert 0 < row["seconds_to_open"] < row["seconds_to_first_batch"]
    for name in ("ms_a_step", "ms_a_step_without_thread"):
        assert found[f"{name}_last_over_first"] == pytest.approx(last[name] / first[name])
