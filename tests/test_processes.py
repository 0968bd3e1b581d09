"""Several processes: they give what one gives, end together, and say which of them was at fault."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from forked import forked_world
from nmt.config import TranslateConfig
from nmt.data.dataset import open_dataset
from nmt.decoding.translator import Translator
from nmt.distributed import world as distributed
from nmt.distributed.launcher import family
from nmt.evaluation.metrics import bleu
from nmt.io import read_lines
from nmt.runs import checkpoint
from nmt.training import memory, step
from nmt.training.loop import train_model
from nmt.training.memory import probe_memory
from nmt.training.step import Trainer, prepare, train_step
from tiny import (
    ALONE,
    STEPS,
    at,
    equal,
    final,
    finish,
    losses,
    metrics,
    settings,
    start,
    state,
    torchrun,
    train_together,
    weights,
    worker,
)

pytestmark = pytest.mark.slow

AT_STEP = """
from nmt.training import loop
take_step = loop.train_step
def hooked(trainer, update, step):
    if step == {step} and rank == {rank}:
        {do}
    return take_step(trainer, update, step)
loop.train_step = hooked
"""
"""Lets one process do something at the beginning of a step."""

PLAIN = ("model.dropout=0", "runtime.log_every=1", "runtime.device_tokens=60")


def launched(command: list[str], size: int) -> subprocess.Popen[str]:
    """What `nmt train --processes` does."""
    code = f"import sys; from nmt.distributed.launcher import launch; sys.exit(launch(sys.argv[1:], {size}))"
    return subprocess.Popen([sys.executable, "-c", code, *command], stderr=subprocess.PIPE, text=True)


def wait_until(holds, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.05)


def step_of(run: Path) -> int:
    try:
        return max((row["step"] for row in metrics(run)), default=0)
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


# ── the same results ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [2, 4])
def test_processes_that_stopped_in_an_epoch_go_on_to_the_same_bits(paths, tmp_path, size):
    changes = ("bpe.dropout=0.1", "model.attention_dropout=0.1")
    train_together(settings(*changes), at(paths, tmp_path / "whole"), size)
    cut = at(paths, tmp_path / "cut")
    train_together(settings(*changes, "train.max_steps=13"), cut, size)
    train_together(settings(*changes), cut, size)
    assert equal(weights(cut.run), weights(tmp_path / "whole"))
    assert equal(final(cut.run), final(tmp_path / "whole"))


def test_another_number_of_processes_takes_the_same_pairs_to_the_same_losses(paths, tmp_path):
    train_model(settings(*PLAIN), at(paths, tmp_path / "one"), ALONE)
    for name, first, then in (("1 then 2", 1, 2), ("2 then 1", 2, 1), ("2 then 3", 2, 3)):
        run = at(paths, tmp_path / name)
        train_together(settings(*PLAIN, "train.max_steps=11"), run, first)
        train_together(settings(*PLAIN), run, then)
        assert losses(run.run) == pytest.approx(losses(tmp_path / "one"), abs=1e-5), name
        assert state(run.run)["step"] == STEPS
        for key in ("epoch", "update"):
            assert state(run.run)[key] == state(tmp_path / "one")[key]


def test_validation_shared_by_processes_gives_the_bleu_of_one(paths, tmp_path):
    # So many updates that the translations are not empty, in batches so small that everyone gets several.
    changes = ("optim.schedule=constant", "optim.learning_rate=5e-3", "model.dropout=0", "train.max_steps=150")
    looking = ("train.validate_every=150", "train.validate_sentences=9", "translate.batch_tokens=60")
    run = at(paths, tmp_path / "run")
    train_together(settings(*changes, *looking), run, 3)
    found = json.loads((run.run / "final" / "state.json").read_text())
    greedy = TranslateConfig(beam=1, batch_tokens=60)
    hyps = Translator.load(run.run, greedy, device="cpu").translate(read_lines(paths.clean / "dev.en"))
    assert len(set(hyps)) > 2
    refs = [[ref] for ref in read_lines(paths.clean / "dev.zh")]
    assert found["dev_scores"][found["made_of"]] == bleu(hyps, refs, "zh").value


def test_two_agents_with_a_rendezvous_train_as_two_nodes_would(paths, tmp_path):
    config = settings(*PLAIN)
    train_model(config, at(paths, tmp_path / "one"), ALONE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    command = worker(config, at(paths, tmp_path / "two"))
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "7"]
    words = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-endpoint", where, *command]
    nodes = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [code for code, _ in finish(nodes)] == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


# ── ending ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["whole", "raises", "is told to stop"])
def test_no_thread_of_gloo_outlives_the_training(paths, tmp_path, how):
    # Such a thread aborts the process if it wants the interpreter's lock when the interpreter is gone.
    look = """
import atexit, glob
def threads():
    return sum(open(name).read().startswith("pt_gloo") for name in glob.glob("/proc/self/task/*/comm"))
atexit.register(lambda: print("threads at the end:", threads(), file=sys.stderr))
"""
    do = "print('threads at work:', threads(), file=sys.stderr)\n        "
    do += {"whole": "pass", "raises": "1 / 0", "is told to stop": "os.kill(os.getpid(), 15)"}[how]
    here = AT_STEP.format(step=8, rank=1, do=do)
    _, (code, errors) = finish(start(worker(settings(), at(paths, tmp_path / "run"), look + here), 2))
    assert code == {"whole": 0, "raises": 1, "is told to stop": 143}[how], errors[-3000:]
    assert "threads at work: 0" not in errors
    assert "threads at work:" in errors
    assert errors.rstrip().endswith("threads at the end: 0")


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_after_a_kill_and_ends_with_the_same_weights(paths, tmp_path, rank):
    train_together(settings(), at(paths, tmp_path / "whole"), 2)
    marker = tmp_path / "killed"
    do = f"import os; first = not os.path.exists({str(marker)!r}); open({str(marker)!r}, 'w').close()\n"
    do += "        if first: os.kill(os.getpid(), 9)"
    command = worker(settings(), at(paths, tmp_path / "cut"), AT_STEP.format(step=13, rank=rank, do=do))
    [(code, errors)] = finish([torchrun(command, 2, "--max-restarts", "1")])
    assert code == 0, errors[-9000:]
    assert marker.exists()
    assert equal(final(tmp_path / "cut"), final(tmp_path / "whole"))


@pytest.mark.parametrize("how", ["launch", "torchrun", "bare"])
def test_when_one_process_raises_all_end_and_it_is_named_with_its_step_and_error(paths, tmp_path, how):
    patch = AT_STEP.format(step=8, rank=1, do="raise ValueError('the dog ate it')")
    command = worker(settings(), at(paths, tmp_path / "run"), patch)
    begun = time.monotonic()
    if how == "bare":
        (one, quiet), (two, errors) = finish(start(command, 2))
        assert 0 not in (one, two)
        assert "lost contact with the other processes" in quiet.strip().split("\n")[-1]
        assert "ValueError: the dog ate it" in errors
    else:
        [(code, errors)] = finish([launched(command, 2) if how == "launch" else torchrun(command, 2)])
        assert code == 1
        line = "process 1 of 2, step 8: ValueError: the dog ate it"
        if how == "launch":
            assert errors.strip().split("\n")[-1] == line
        assert line in errors
    assert time.monotonic() - begun < 90  # The start of the processes included.
    assert state(tmp_path / "run")["state"] == "failed"
    assert checkpoint.newest(tmp_path / "run") == checkpoint.step_folder(tmp_path / "run", 5)


def test_a_killed_process_is_named_by_the_launcher(paths, tmp_path):
    patch = AT_STEP.format(step=8, rank=1, do="import os; os.kill(os.getpid(), 9)")
    [(code, errors)] = finish([launched(worker(settings(), at(paths, tmp_path / "run"), patch), 2)])
    assert code == 137
    assert errors.strip().split("\n")[-1] == "process 1 of 2 was ended by SIGKILL."


SLOW_STEPS = AT_STEP.format(step="step", rank="rank", do="import time; time.sleep(0.05)")


@pytest.mark.parametrize("how", ["launch", "torchrun", "alone"])
@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGTERM, "who started them"), (signal.SIGINT, "who started them"), (signal.SIGTERM, "all processes")],
)
def test_a_signal_is_answered_by_a_save_of_all_at_one_step(paths, tmp_path, how, number, to):
    size = 1 if how == "alone" else 2
    config = settings("train.max_steps=400", "train.save_every=300", "train.validate_every=400", "runtime.log_every=1")
    run = at(paths, tmp_path / "run")
    command = worker(config, run, SLOW_STEPS)
    if how == "alone":
        process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    else:
        process = launched(command, 2) if how == "launch" else torchrun(command, 2)
    wait_until(lambda: step_of(run.run) >= 3)
    for pid in family(process.pid) if to == "all processes" else [process.pid]:
        os.kill(pid, number)
    seen = step_of(run.run)
    [(code, errors)] = finish([process])
    # torchrun's own exit code after a signal is always 1; so status.json is what a queue has to look at.
    assert code == (1 if how == "torchrun" else 128 + number), errors[-2000:]
    assert state(run.run)["state"] == "preempted"
    step = state(run.run)["step"]
    assert checkpoint.newest(run.run) == checkpoint.step_folder(run.run, step)
    assert seen <= step <= seen + 40  # Steps go on while the signal is under way; what counts is that all are at one.
    name = signal.Signals(number).name
    if how != "torchrun":  # Its agent passes on SIGTERM whatever it got.
        assert f"stopped by {name} after step {step}, which is saved" in errors
    short = settings("train.max_steps=400", "train.save_every=300", "train.validate_every=400", "runtime.log_every=1")
    train_together(short, run, size)
    train_together(short, at(paths, tmp_path / "whole"), size)
    assert equal(weights(run.run, 400), weights(tmp_path / "whole", 400))


@pytest.mark.parametrize("how", ["launch", "torchrun"])
def test_a_second_signal_ends_all_at_once_where_the_first_is_not_answered(paths, tmp_path, how):
    # One process hangs, so there is no step after which all could save.
    stuck = "from nmt.training import watchdog\nwatchdog.AGAIN = 0.5\n"
    stuck += AT_STEP.format(
        step=8, rank=1, do="open(sys.argv[1] + '.stuck', 'w').close(); import time; time.sleep(900)"
    )
    command = worker(settings("runtime.log_every=1"), at(paths, tmp_path / "run"), stuck)
    process = launched(command, 2) if how == "launch" else torchrun(command, 2)
    wait_until(Path(command[1] + ".stuck").exists)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    [(code, errors)] = finish([process])
    assert code == (130 if how == "launch" else 1), errors[-3000:]
    assert checkpoint.newest(tmp_path / "run") == checkpoint.step_folder(tmp_path / "run", 5)


def test_a_late_second_signal_to_the_launcher_ends_processes_that_answer_none(tmp_path):
    deaf = "import os, signal, sys, time; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\n"
    deaf += "open(sys.argv[1] + os.environ['RANK'], 'w').close(); time.sleep(900)"
    code = "import sys; from nmt.distributed import launcher; launcher.AGAIN, launcher.GRACE = 1.0, 0.5\n"
    code += "sys.exit(launcher.launch(sys.argv[1:], 2))"
    command = [sys.executable, "-c", code, "-c", deaf, f"{tmp_path}/up"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert process.poll() is None, "two at once are one"
    process.send_signal(signal.SIGTERM)
    [(code, errors)] = finish([process])
    assert code == 137, errors


def test_workers_do_not_outlive_a_launcher_that_was_killed(paths, tmp_path):
    config = settings("train.max_steps=4000", "runtime.log_every=1")
    process = launched(worker(config, at(paths, tmp_path / "run"), SLOW_STEPS), 2)
    wait_until(lambda: step_of(tmp_path / "run") >= 2)
    pids = [json.loads(path.read_text())["pid"] for path in (tmp_path / "run" / "heartbeat").glob("process-*.json")]
    assert len(pids) == 2
    process.kill()
    process.wait()

    def gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_error_aborts_a_group_of_nccl_which_would_wait_for_a_dead_process(tmp_path, backend, fails):
    def process(rank: int) -> None:
        calls = []
        if backend == "nccl":  # As on a GPU, but for what computes and what talks.
            honest = distributed.distributed.init_process_group
            distributed.choose_device = lambda *_: torch.device("cuda", 0)
            distributed.distributed.init_process_group = lambda name, **more: honest("gloo", **more)
        for module, name in ((distributed, "_abort_process_group"), (distributed.distributed, "destroy_process_group")):
            end = getattr(module, name)
            setattr(module, name, lambda end=end, name=name: (calls.append(name), end()))
        try:
            with distributed.init_distributed("auto") as world:
                assert world.sum([1.0]) == [2.0]
                if fails:
                    raise ValueError("the dog ate it")
        except ValueError:
            assert fails
        assert calls == ["_abort_process_group" if backend == "nccl" and fails else "destroy_process_group"]
        assert not torch.distributed.is_initialized()
        del world  # It holds a group as well.
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        assert not [name for name in names if name.startswith("pt_gloo")]

    for ended in forked_world(2, process):
        assert ended.code == 0, ended.told


def test_a_run_of_other_settings_is_refused_as_in_one_process_with_the_exit_code_and_one_reason(paths, tmp_path):
    run = at(paths, tmp_path / "run")
    train_model(settings("train.max_steps=5"), run, ALONE)
    before = state(run.run)
    [(code, errors)] = finish([launched(worker(settings("train.seed=2"), run), 2)])
    assert code == 2, errors
    assert "train.seed: 1 -> 2" in errors.strip().split("process 0 of 2, step 0: ")[-1]
    assert "lost contact" not in errors
    assert state(run.run) == before


# ── what goes wrong between them ────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_process_is_told_with_how_many_joined(paths, tmp_path):
    command = worker(settings("runtime.collective_timeout=5"), at(paths, tmp_path / "run"))
    [(code, errors)] = finish(start(command, 2, ranks=range(1)))
    assert code == 1
    assert "process 0 of 2 could not join the others" in errors
    assert "1/2 clients joined" in errors
    [(code, errors)] = finish(start(command, 2, ranks=range(1, 2)))
    assert code == 1
    assert "process 1 of 2 could not join the others" in errors
    assert "Traceback" not in errors


def test_a_port_in_use_is_told(paths, tmp_path):
    command = worker(settings("runtime.collective_timeout=5"), at(paths, tmp_path / "run"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for code, errors in finish(start(command, 2, port=taken.getsockname()[1])):
            assert code == 1
            assert f"127.0.0.1:{taken.getsockname()[1]}" in errors
            assert "Traceback" not in errors


@pytest.mark.parametrize("lacks", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_environment_that_is_not_whole_is_told(paths, tmp_path, lacks):
    world = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    command = [sys.executable, *worker(settings(), at(paths, tmp_path / "run"))]
    env = os.environ | {name: value for name, value in world.items() if name != lacks}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, lacks in done.stderr) == (2, True), done.stderr


def test_a_process_that_is_stopped_is_named_by_the_other_and_may_go_on(paths, tmp_path):
    config = settings("runtime.heartbeat_timeout=1.5", "runtime.log_every=1", "train.max_steps=40")
    processes = start(worker(config, at(paths, tmp_path / "run"), SLOW_STEPS), 2)
    wait_until(lambda: step_of(tmp_path / "run") >= 3)
    processes[1].send_signal(signal.SIGSTOP)
    time.sleep(5)
    processes[1].send_signal(signal.SIGCONT)
    (code, errors), (other, _) = finish(processes)
    assert (code, other) == (0, 0), errors
    assert f"process 1 of 2 has been unresponsive for 2 s: pid {processes[1].pid}" in errors
    assert state(tmp_path / "run")["state"] == "finished"


def test_gradients_are_first_exchanged_with_a_single_pair_after_all_have_agreed_that_it_fits(paths, tmp_path):
    def process(rank: int) -> None:
        passed, honest = [], memory.probe_memory
        compute = memory._pass
        memory._pass = lambda trainer, data, pairs: (passed.append(len(pairs)), compute(trainer, data, pairs))
        with distributed.init_distributed("cpu") as world:
            trainer = step.Trainer.build(settings("runtime.device_tokens=40"), world, (340, 340))
            before = checkpoint.digest(trainer.model.state_dict())
            honest(trainer, open_dataset(paths.encode, "train", "en", "zh"))
            assert checkpoint.digest(trainer.model.state_dict()) == before
            assert not any(parameter.grad.any() for parameter in trainer.model.parameters())
            del trainer
        assert passed[:3] == [1, 1, 1], "alone, then exchanged twice"
        assert len(passed) == 4
        assert passed[3] > 1

    for ended in forked_world(2, process):
        assert ended.code == 0, ended.told


POISON = """
from nmt.training import loop, step as steps
take_step, loss_of, now = loop.train_step, steps.label_smoothed_loss, [0]
def counting(trainer, update, number):
    now[0] = number
    return take_step(trainer, update, number)
def poisoned(*arguments):
    loss, nll = loss_of(*arguments)
    return (loss * float("nan"), nll) if rank == 1 and now[0] in {steps} else (loss, nll)
loop.train_step, steps.label_smoothed_loss = counting, poisoned
"""


def test_a_bad_gradient_in_one_process_is_left_out_by_all(paths, tmp_path):
    run = at(paths, tmp_path / "run")
    train_together(settings("runtime.log_every=1"), run, 2, POISON.format(steps={7, 9}))
    assert state(run.run)["skipped"] == 2
    moments = checkpoint.load_optimizer(checkpoint.step_folder(run.run, STEPS))
    assert {float(value) for name, value in moments.items() if name.endswith(".step")} == {STEPS - 2.0}
    for code, errors in finish(
        start(worker(settings(), at(paths, tmp_path / "bad"), POISON.format(steps="range(3, 99)")), 2)
    ):
        assert code == 1
        assert "steps 3 to 12: the gradient was not finite" in errors


def test_when_memory_runs_out_in_one_process_all_end_and_it_is_named(paths, tmp_path):
    patch = """
from nmt.training import memory
def no_room(*arguments):
    raise MemoryError
if rank == 1:
    memory._pass = no_room
"""
    begun = time.monotonic()
    (one, quiet), (two, errors) = finish(start(worker(settings(), at(paths, tmp_path / "run"), patch), 2))
    assert (one, two) == (1, 1)
    assert "another process is out of memory" in quiet
    assert "process 1 of 2 is out of memory on cpu" in errors
    assert "Lower runtime.device_tokens" in errors
    assert time.monotonic() - begun < 90


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("accumulating", [True, False])
def test_gradients_are_in_the_buckets_of_ddp_from_the_first_micro_batch_on(paths, accumulating):
    """Anywhere else they would be a second set, as large as the model, until the last micro-batch is exchanged."""
    data = open_dataset(paths.encode, "train", "en", "zh")
    parts = [np.arange(40), np.arange(3)] if accumulating else [np.arange(3), np.arange(3, 5)]

    def process(rank: int) -> None:
        with distributed.init_distributed("cpu") as world:
            trainer = Trainer.build(
                settings("runtime.device_tokens=" + ("40" if accumulating else "60")), world, (340, 340)
            )
            buckets: set[range] = set()

            def exchange(_, bucket):
                buffer = bucket.buffer()
                if not bucket.index():
                    buckets.clear()  # Those of the pass before may be gone.
                buckets.add(range(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes))
                work = torch.distributed.all_reduce(buffer.div_(world.size), async_op=True)
                return work.get_future().then(lambda done: done.value()[0])

            trainer.parallel.register_comm_hook(None, exchange)
            trainer = probe_memory(trainer, data)
            forward, seen = step.TrainingModel.forward, []

            def looking(self, *ids):
                grads = [p.grad for p in trainer.model.parameters()]
                seen.append(all(any(grad.data_ptr() in bucket for bucket in buckets) for grad in grads))
                return forward(self, *ids)

            step.TrainingModel.forward = looking
            held = frozenset(buckets)
            for number in range(4):
                update = prepare(trainer, data, parts[number % 2])
                train_step(trainer, update, number + 1)
                assert len(update.micro_batches) > 1 or number % 2 or not accumulating
            assert seen
            assert all(seen), seen
            assert buckets == held, "none is allocated anew"

    ended = forked_world(2, process)
    assert [code for code, _ in ended] == [0, 0], ended
