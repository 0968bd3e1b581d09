"""train: the loop, and what is kept of it on disk."""

import contextlib
import itertools
import logging
import math
import resource
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nmt.config import SECTIONS, Config, of_kind
from nmt.data.batching import Numbers, count_updates, plan_updates, windows
from nmt.data.dataset import Lines, ParallelDataset, open_dataset, resample
from nmt.data.prefetch import Prefetch
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.distributed.host import warn_of_slow
from nmt.distributed.launcher import write_error_file
from nmt.distributed.world import World, is_lost_contact
from nmt.errors import CheckpointError, LostContact, NmtError, Preempted, first_line
from nmt.io import read_object
from nmt.model.flops import peak_flops
from nmt.runs import checkpoint
from nmt.runs.identity import TrainPaths, unchanged
from nmt.runs.opening import open_run
from nmt.runs.overlap import warn_of_overlap
from nmt.runs.run_dir import RunDir
from nmt.training.memory import probe_memory
from nmt.training.metrics_logger import MetricsLogger, duration
from nmt.training.resume import require_equal_settings, require_equal_state, require_shared, resume, settle
from nmt.training.saver import Saver, write_status
from nmt.training.step import StepStats, Trainer, Update, derive_seed, prepare, train_step
from nmt.training.validation import DevSet, Progress, choose_final, validate
from nmt.training.watchdog import GracefulShutdown, Heartbeat, SkippedSteps, preempted

log = logging.getLogger(__name__)

AHEAD = 4
"""Updates that are cut and padded ahead of the one that is computed."""

Place = tuple[int, int, int]
"""Where an update leaves a training: epoch, window of it, and updates that are done of this."""


def train_model(
    config: Config, paths: TrainPaths, world: World, *, fresh: bool = False, init_from: Path | None = None
) -> None:
    """Train until max_steps or early stopping, resuming from the newest checkpoint, and choose the final model.

    `fresh` starts over; `init_from` is a run whose final weights a new training begins with. A finished run is left
    as it is. Raises Preempted when a signal ended it after a save. Who calls this holds the run's lock.
    """
    if not fresh and world.broadcast([float(world.is_main and is_finished(config, paths, init_from))])[0]:
        log.info("train: %s is finished; nothing to do", paths.run)
        return
    try:
        given, config = config, settle(config, paths.run, world, fresh=fresh)
        if world.is_main:
            warn_of_slow("train.precision", config.train.precision, world.device)
        with world.all_or_none():
            if world.is_main:
                checkpoint.recover(paths.run)
                open_run(config, paths, numerics(config, world), fresh=fresh, init_from=init_from, given=given)
                if init_from is not None:
                    warn_of_overlap(paths.run, paths.clean, (config.data.src, config.data.tgt))
        require_shared(paths.run, world, config.runtime.collective_timeout)
    except NmtError as error:
        report_failure(world, 0, error)
        raise
    begun = time.monotonic()
    with (
        GracefulShutdown(world) as stop,
        Heartbeat(paths.run.heartbeat, world, config.runtime.heartbeat_timeout) as heartbeat,
    ):
        try:
            with world.all_or_none():
                data, dev = open_data(config, paths, world)
            require_equal_settings(config, paths, world)
            sizes = (len(dev.tokenizers[0]), len(dev.tokenizers[1]))
            trainer = Trainer.build(config, world, sizes, heartbeat)
            progress = resume(trainer, paths.run, init_from)
            if world.is_main and progress.step:  # A process that was killed may have left more than are averaged.
                checkpoint.prune(paths.run, config.train.keep_checkpoints, config.train.save_every, progress.step)
            if not should_stop(config, progress):
                if world.is_main:
                    log.info("train: %s", header(trainer, data, paths.run))
                trainer, progress = fit_memory(trainer, data, progress)
            require_equal_state(trainer, progress)
            write_status(trainer, paths.run, "running", progress)
            with MetricsLogger(
                paths.run, first_step=progress.step, last_step=config.train.max_steps, writes=world.is_main
            ) as tracker:
                progress = loop(trainer, paths, data, dev, progress, tracker, stop)
                choose_final(trainer, paths.run, dev, progress, tracker)
            write_status(trainer, paths.run, "finished", progress)
            if world.is_main:
                log.info("train: done in %s (%s)", duration(time.monotonic() - begun), paths.run)
        except BaseException as error:
            reason = record_failure(paths.run, world, heartbeat.place["step"], error)
            if reason is error:
                raise
            raise reason from error


def header(trainer: Trainer, data: ParallelDataset, run: Path) -> str:
    """What is trained, on what and for how long, in one line; an epoch has as many updates as the first has."""
    train, world = trainer.config.train, trainer.world
    updates = count_updates(data.src.lengths, data.tgt.lengths, train.batch_tokens, train.length_buckets, train.seed)
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    gpu = f" ({torch.cuda.get_device_name(world.device)})" if world.device.type == "cuda" else ""
    return (
        f"{size / 1e6:.1f} M parameters, {world.size} process{'es' if world.size > 1 else ''} on "
        f"{world.device.type}{gpu}, {train.precision}, {train.max_steps:,} updates of {train.batch_tokens:,} tokens a "
        f"side ({train.max_steps / updates:,.{0 if train.max_steps >= 10 * updates else 1}f} epochs of {updates:,} "
        f"updates), {run}"
    )


def open_data(config: Config, paths: TrainPaths, world: World) -> tuple[ParallelDataset, DevSet]:
    """What is trained on and what it is measured by; one process of each machine hashes the encoded files."""
    src, tgt, verify = config.data.src, config.data.tgt, not world.local_rank
    tokenizers = load_tokenizers(paths.bpe, src, tgt)
    data = open_dataset(paths.encode, "train", src, tgt, verify=verify)
    return data, DevSet.load(config, paths, tokenizers, verify=verify)


def fit_memory(trainer: Trainer, data: ParallelDataset, progress: Progress) -> tuple[Trainer, Progress]:
    """Rehearse the largest micro-batch; what `device_tokens: auto` has found once stays, for updates are cut by it."""
    finds = trainer.config.runtime.device_tokens == "auto"
    if finds and progress.device_tokens:
        trainer = replace(trainer, device_tokens=progress.device_tokens)
    trainer = probe_memory(trainer, data)
    return trainer, replace(progress, device_tokens=trainer.device_tokens if finds else 0)


def loop(
    trainer: Trainer,
    paths: TrainPaths,
    train_set: ParallelDataset,
    dev: DevSet,
    progress: Progress,
    tracker: MetricsLogger,
    stop: GracefulShutdown,
) -> Progress:
    """Step, log, validate and save until the training is over."""
    train, runtime, run = trainer.config.train, trainer.config.runtime, paths.run
    skips, meter = SkippedSteps(progress.skipped), Meter(trainer.world, train.precision)
    trainer.model.train()
    planned = updates(trainer.config, paths, train_set, dev.tokenizers, progress)
    with stop.stepping(), Prefetch(prepared(trainer, planned), AHEAD) as coming, Saver(trainer, run) as saver:
        while not should_stop(trainer.config, progress):
            trainer.at("waiting for its pairs", step=progress.step + 1)
            update, (epoch, window, done) = next(coming)
            progress = replace(progress, step=progress.step + 1, epoch=epoch, window=window, update=done)
            stats = train_step(trainer, update, progress.step)
            meter.add(stats, coming.waited)
            tracker.advance()
            last = progress.step >= train.max_steps
            skips.add(progress.step, stats.skipped, update.rows)
            saver.check()
            best = False
            if progress.step % runtime.log_every == 0 or last:
                skips.settle()
                tracker.log_scalars("train", progress.step, meter.report() | {"epoch": epoch, "skipped": skips.count})
            if progress.step % train.validate_every == 0 or last:
                with meter.paused():
                    saver.wait()  # Processes that share the translation can't be forked beside a thread.
                    found = validate(trainer, dev, progress, tracker)
                    # At another last step it is for the log alone, so that a resumed training does not know of it.
                    if progress.step % train.validate_every == 0:
                        progress, best = found, found.best_step == found.step
            over = should_stop(trainer.config, progress)
            signal, wished = stop.requested(last=over, wish=saver.wishes())
            due = progress.step % train.save_every == 0 or wished or signal > 0 or over
            if due or best:
                skips.settle()
                progress = replace(progress, skipped=skips.count)
                with meter.paused(), stop.saving():
                    saver.save(progress, resumable=due, best=best)
                    if signal or over:  # A launcher may end the leader when the others have ended.
                        saver.wait()
                        trainer.world.barrier()
            if signal:
                raise preempted(signal, progress.step)
    return progress


def prepared(
    trainer: Trainer, planned: Generator[tuple[ParallelDataset, Numbers, Place]]
) -> Generator[tuple[Update, Place]]:
    """The updates of a plan with all that the host works out for them."""
    with contextlib.closing(planned):
        for data, pairs, place in planned:
            yield prepare(trainer, data, pairs), place


def updates(
    config: Config,
    paths: TrainPaths,
    plain: ParallelDataset,
    tokenizers: tuple[Tokenizer, Tokenizer],
    progress: Progress,
) -> Generator[tuple[ParallelDataset, Numbers, Place]]:
    """Updates without end from where `progress` is, as pairs of a dataset; the next window is planned meanwhile."""
    done = progress.update
    with Prefetch(plans(config, paths, plain, tokenizers, progress), 1) as planned:
        for data, plan, epoch, window in planned:
            for number in range(done, len(plan)):
                yield data, plan[number], (epoch, window, number + 1)
            done = 0


def plans(
    config: Config,
    paths: TrainPaths,
    plain: ParallelDataset,
    tokenizers: tuple[Tokenizer, Tokenizer],
    progress: Progress,
) -> Iterator[tuple[ParallelDataset, list[Numbers], int, int]]:
    """The windows of all epochs from where `progress` is: dataset, updates, epoch and number of the window.

    BPE-dropout cuts the text of each window anew, into a dataset of its own.
    """
    dropout, train = config.bpe.dropout, config.train
    text = [Lines(paths.clean / f"train.{language}") for language in (config.data.src, config.data.tgt) if dropout]
    for epoch in itertools.count(progress.epoch):
        for window, pairs in enumerate(windows(len(plain), train.seed, epoch)):
            if (epoch, window) < (progress.epoch, progress.window):
                continue
            data, seed = plain, (train.seed, epoch, window + 1)
            if dropout:
                src, tgt = (lines.take(plain.rows[pairs]) for lines in text)
                cut_anew = (tokenizers, dropout, derive_seed(*seed) % 2**30, config.encode.max_tokens)
                data, pairs = resample(plain, pairs, (src, tgt), *cut_anew), np.arange(len(pairs))
            lengths = data.src.lengths, data.tgt.lengths
            yield data, plan_updates(pairs, *lengths, train.batch_tokens, train.length_buckets, seed), epoch, window


def should_stop(config: Config, progress: Progress) -> bool:
    """Whether the training has taken all its steps, or has not got better for as long as its patience."""
    impatient = bool(config.train.early_stop_patience) and progress.bad_validations >= config.train.early_stop_patience
    return progress.step >= config.train.max_steps or impatient


class Meter:
    """Sums what steps measured until it is reported."""

    def __init__(self, world: World, precision: str) -> None:
        self.world = world
        on_gpu = world.device.type == "cuda"
        self.peak = peak_flops(torch.cuda.get_device_name(world.device), precision) if on_gpu else None
        self.stats: list[StepStats] = []
        self.since = time.perf_counter()

    def add(self, stats: StepStats, waited: float = 0.0) -> None:
        """Take one step in, and the seconds that it waited for its pairs."""
        self.stats.append(replace(stats, seconds=stats.seconds | {"data": stats.seconds["data"] + waited}))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose time is not that of steps; what a GPU still has to do for them is waited for before."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        started = time.perf_counter()
        yield
        self.since += time.perf_counter() - started

    def report(self) -> dict[str, float]:
        """Means over the steps since the last report; loss and nll are in nats for each target token.

        Skipped steps count for the speed only: their loss is not finite.
        """
        stats = self.stats
        # All of them in one copy from the device, which is waited for here: then all steps are done.
        measured = torch.stack([torch.stack([s.loss, s.nll, s.grad_norm.double(), s.skipped.double()]) for s in stats])
        taken = [row for row in zip(*measured.T.tolist(), stats, strict=True) if not row[3]]
        seconds = (now := time.perf_counter()) - self.since
        loss, nll = self.world.sum([sum(row[0] for row in taken), sum(row[1] for row in taken)])
        values: dict[str, float] = {}
        if taken:
            tgt_tokens = sum(row[4].tgt_tokens for row in taken)
            values = {
                "loss": loss / tgt_tokens,
                "nll": nll / tgt_tokens,
                "ppl": math.exp(min(nll / tgt_tokens, 20)),
                "learning_rate": stats[-1].rate,
                "grad_norm": sum(row[2] for row in taken) / len(taken),
            }
        values |= {
            "steps": len(stats),
            "tokens_per_second": sum(s.tokens for s in stats) / seconds,
            "padding": sum(s.padding for s in stats) / len(stats),
        }
        values |= {f"seconds_{key}": sum(s.seconds[key] for s in stats) / len(stats) for key in stats[0].seconds}
        if self.peak:
            values["mfu"] = sum(s.flops for s in stats) / seconds / (self.peak * self.world.size)
        values["peak_memory_mib"] = peak_memory(self.world.device)
        self.stats, self.since = [], now
        return values


def peak_memory(device: torch.device) -> float:
    """MiB that this process held at most: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def numerics(config: Config, world: World) -> dict[str, Any]:
    """What changes the rounding of a training and its dropout masks, but nothing else."""
    sections = {name: of_kind(getattr(config, name), "numerics") for name in SECTIONS}
    where = {"processes": world.size, "device": world.device.type, "threads": torch.get_num_threads()}
    return {name: values for name, values in sections.items() if values} | where


def is_finished(config: Config, paths: TrainPaths, init_from: Path | None) -> bool:
    """Whether the run has been trained to its end with these settings and this data, and has its final model."""
    try:
        status = read_object(paths.run.status_file)
        state, progress = status.pop("state"), Progress(**status)
    except (CheckpointError, KeyError, TypeError):
        return False
    ended = state == "finished" and should_stop(config, progress) and progress.step <= config.train.max_steps
    return ended and unchanged(config, paths, init_from) and checkpoint.fault(paths.run.final) is None


def record_failure(run: RunDir, world: World, step: int, error: BaseException) -> BaseException:
    """Write down that a training ends before its end, and why; returns what is to be raised."""
    asked = isinstance(error, (Preempted, KeyboardInterrupt, SystemExit))
    if isinstance(error, Preempted) and not world.is_main:
        error = SystemExit(error.exit_code)  # One process has said it for all.
    if is_lost_contact(error):
        error = LostContact(f"lost contact with the other processes: {first_line(error)}")
    if world.is_main:
        with contextlib.suppress(
            OSError, CheckpointError
        ):  # What ended the training matters more, and may be the same.
            status = read_object(run.status_file)
            run.write_status(status | {"state": "preempted" if asked else "failed"})
    if not asked:
        report_failure(world, step, error)
    elif world.is_main and not isinstance(error, Preempted):
        log.info("train: stopped by a signal at step %s; the same command resumes from the newest checkpoint", step)
    return error


def report_failure(world: World, step: int, error: BaseException) -> None:
    """Report why this process ends to the launcher of several."""
    if world.size > 1:
        kind = "" if isinstance(error, NmtError) else f"{type(error).__name__}: "
        word = f"process {world.rank} of {world.size}, step {step:,}: {kind}{error}"
        write_error_file(word, is_consequence=isinstance(error, LostContact))
