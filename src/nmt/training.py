"""train: the loop, validation, and what is kept of it on disk."""

import contextlib
import logging
import math
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nmt import checkpoint
from nmt.batching import Numbers, plan_updates
from nmt.config import Config
from nmt.corpus import Normaliser
from nmt.dataset import ParallelDataset, open_dataset, resample
from nmt.distributed import World
from nmt.errors import CheckpointError, NmtError
from nmt.provenance import TrainPaths, lock, open_run, write_json
from nmt.scoring import bleu
from nmt.sizes import peak_flops
from nmt.step import StepStats, Trainer, dev_loss, mix, train_step
from nmt.text import read_lines
from nmt.tokenizer import Tokenizer, load_tokenizers
from nmt.tracking import Tracker
from nmt.translation import Translator

log = logging.getLogger(__name__)

SHOWN = 5
"""Sentences of the dev set whose translations are shown at each validation."""


@dataclass(frozen=True)
class Progress:
    """Where a training is; with weights and optimizer it is all that going on needs."""

    step: int = 0
    epoch: int = 0
    update: int = 0
    """Updates of this epoch that are done."""
    best_score: float | None = None
    """Of the dev set, higher is better: BLEU, or minus the loss."""
    best_step: int = 0
    worse: int = 0
    """Validations since the best one."""


@dataclass(frozen=True)
class DevSet:
    """The dev set as ids for the loss and as text for BLEU, and what text is translated with."""

    data: ParallelDataset
    src: list[str]
    tgt: list[str]
    tokenizers: tuple[Tokenizer, Tokenizer]
    normaliser: Normaliser


def translate_dev(trainer: Trainer, dev: DevSet, sentences: int) -> tuple[float, list[str]]:
    """BLEU on raw text, and the translations, of the first `sentences`; the leading process works it out for all."""
    hyps: list[str] = []
    score = [0.0]
    if trainer.world.leads:
        translator = Translator(trainer.model, *dev.tokenizers, dev.normaliser, trainer.config, trainer.world.device)
        trainer.model.eval()
        hyps = translator.translate(dev.src[:sentences])
        trainer.model.train()
        score = [bleu(hyps, [[ref] for ref in dev.tgt[:sentences]], trainer.config.data.tgt).value]
    return trainer.world.from_leader(score)[0], hyps


def validate(trainer: Trainer, dev: DevSet, progress: Progress, tracker: Tracker) -> Progress:
    """Measure the dev set, show a few translations, and note whether it is the best so far."""
    started, sentences = time.perf_counter(), trainer.config.train.validate_sentences
    loss, nll = dev_loss(trainer, dev.data)
    values = {"loss": loss, "nll": nll, "ppl": math.exp(min(nll, 20))}
    score = -loss
    if sentences:
        values["bleu"], hyps = translate_dev(trainer, dev, sentences)
        rows = list(zip(dev.src, dev.tgt, hyps, strict=False))[:SHOWN]
        tracker.translations(progress.step, rows)
        if trainer.config.optim.stop_on == "bleu":
            score = values["bleu"]
    tracker.numbers("dev", progress.step, values | {"seconds": time.perf_counter() - started})
    if progress.best_score is None or score > progress.best_score:
        return replace(progress, best_score=score, best_step=progress.step, worse=0)
    return replace(progress, worse=progress.worse + 1)


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────────


def train_model(
    config: Config, paths: TrainPaths, world: World, *, fresh: bool = False, init_from: Path | None = None
) -> None:
    """Train until max_steps or until patience ends, going on from the newest checkpoint, and choose the final model.

    `fresh` starts over; `init_from` is a run whose final weights a new training begins with. A finished run is left
    as it is.
    """
    with lock(paths.run) if world.leads else contextlib.nullcontext():
        if world.leads:
            open_run(config, paths, fresh=fresh)
        world.barrier()
        tokenizers = load_tokenizers(paths.bpe, config.data.src, config.data.tgt)
        trainer = Trainer.build(config, world, (len(tokenizers[0]), len(tokenizers[1])))
        progress = resume(trainer, paths.run, init_from)
        if is_over(config, progress) and (paths.run / "final").exists():
            log.info("train: %s is finished at step %s; nothing to do", paths.run, f"{progress.step:,}")
            return
        dev = DevSet(
            open_dataset(paths.encode, "dev", config.data.src, config.data.tgt),
            read_lines(paths.clean / f"dev.{config.data.src}"),
            read_lines(paths.clean / f"dev.{config.data.tgt}"),
            tokenizers,
            Normaliser.load(paths.clean / "normalisation.json"),
        )
        tell(trainer, paths.run, "running", progress)
        tracker = Tracker(paths.run, first_step=progress.step, last_step=config.optim.max_steps, writes=world.leads)
        try:
            with tracker:
                progress = loop(trainer, paths, dev, progress, tracker)
                choose_final(trainer, paths.run, dev, progress, tracker)
        except BaseException:
            tell(trainer, paths.run, "failed", progress)
            raise
        tell(trainer, paths.run, "finished", progress)


def loop(trainer: Trainer, paths: TrainPaths, dev: DevSet, progress: Progress, tracker: Tracker) -> Progress:
    """Step, log, validate and save until the training is over."""
    train = trainer.config.train
    meter = Meter(trainer.world, trainer.config.optim.precision)
    trainer.model.train()
    for data, update, position in updates(trainer.config, paths, dev.tokenizers, progress):
        if is_over(trainer.config, progress):
            break
        progress = replace(progress, step=progress.step + 1, epoch=position[0], update=position[1])
        meter.add(train_step(trainer, data, update, progress.step))
        tracker.advance()
        last = progress.step >= trainer.config.optim.max_steps
        if progress.step % train.log_every == 0 or last:
            tracker.numbers("train", progress.step, meter.report() | {"epoch": progress.epoch})
        if progress.step % train.validate_every == 0 or last:
            progress = validate(trainer, dev, progress, tracker)
            if progress.best_step == progress.step and trainer.world.leads:
                checkpoint.save(paths.run / "best", trainer.model.state_dict(), asdict(progress))
            meter.restart()
        if progress.step % train.save_every == 0 or last or is_over(trainer.config, progress):
            save(trainer, paths.run, progress)
            meter.restart()
    return progress


def updates(
    config: Config, paths: TrainPaths, tokenizers: tuple[Tokenizer, Tokenizer], progress: Progress
) -> Iterator[tuple[ParallelDataset, Numbers, tuple[int, int]]]:
    """Updates without end from where `progress` is: data, pairs, and the (epoch, update) that is reached by it."""
    src, tgt, seed = config.data.src, config.data.tgt, config.optim.seed
    plain = data = open_dataset(paths.encode, "train", src, tgt)
    text: tuple[Sequence[str], Sequence[str]] = ((), ())
    if config.bpe.dropout:
        sides = [read_lines(paths.clean / f"train.{language}") for language in (src, tgt)]
        text = tuple([side[row] for row in plain.rows] for side in sides)  # type: ignore[assignment]
    epoch, first = progress.epoch, progress.update
    while True:
        if config.bpe.dropout:
            dropout, longest = config.bpe.dropout, config.encode.max_tokens
            data = resample(plain, text, tokenizers, dropout, mix(seed, epoch) % 2**30, longest)
        plan = plan_updates(data.src.lengths, data.tgt.lengths, config.optim.batch_tokens, seed, epoch)
        for number in range(first, len(plan)):
            yield data, plan[number], (epoch, number + 1)
        epoch, first = epoch + 1, 0


def is_over(config: Config, progress: Progress) -> bool:
    """Whether the training has taken all its steps, or has not got better for as long as its patience."""
    impatient = bool(config.optim.patience) and progress.worse >= config.optim.patience
    return progress.step >= config.optim.max_steps or impatient


class Meter:
    """Sums what steps measured until it is reported."""

    def __init__(self, world: World, precision: str) -> None:
        self.world = world
        on_gpu = world.device.type == "cuda"
        self.peak = peak_flops(torch.cuda.get_device_name(world.device), precision) if on_gpu else None
        self.stats: list[StepStats] = []
        self.since = time.perf_counter()

    def add(self, stats: StepStats) -> None:
        """Take one step in."""
        self.stats.append(stats)

    def restart(self) -> None:
        """Leave the time since the last step out: it went into something else than steps."""
        if not self.stats:
            self.since = time.perf_counter()

    def report(self) -> dict[str, float]:
        """Means over the steps since the last report; loss and nll are in nats for each target token."""
        stats, now = self.stats, time.perf_counter()
        loss, nll = self.world.sum([float(sum(s.loss for s in stats)), float(sum(s.nll for s in stats))])
        tgt_tokens, seconds = sum(s.tgt_tokens for s in stats), now - self.since
        values = {
            "loss": loss / tgt_tokens,
            "nll": nll / tgt_tokens,
            "ppl": math.exp(min(nll / tgt_tokens, 20)),
            "learning_rate": stats[-1].rate,
            "grad_norm": float(sum(s.grad_norm for s in stats)) / len(stats),
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


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def resume(trainer: Trainer, run: Path, init_from: Path | None) -> Progress:
    """Load the newest checkpoint, or the weights to begin with, into the trainer."""
    folder = checkpoint.newest(run)
    if folder is not None:
        weights, state = checkpoint.load(folder)
        trainer.model.load_state_dict(weights)
        checkpoint.restore_optimizer(trainer.optimizer, trainer.model, checkpoint.load_optimizer(folder))
        log.info("train: going on from %s", folder)
        return Progress(**state)
    if init_from is not None:
        weights, _ = checkpoint.load(init_from / "final")
        try:
            trainer.model.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(
                f"the weights of {init_from} do not fit this model and vocabulary: {error}"
            ) from error
        for path in sorted((run / "tokenizer").glob("*.model")):
            if (init_from / "tokenizer" / path.name).read_bytes() != path.read_bytes():
                raise CheckpointError(
                    f"{init_from} has another vocabulary; set bpe.model to [{init_from / 'tokenizer' / path.name}]."
                )
    return Progress()


def save(trainer: Trainer, run: Path, progress: Progress) -> None:
    """Write a checkpoint and remove the oldest; every process waits until it is on the disk."""
    if trainer.world.leads:
        tensors = checkpoint.optimizer_tensors(trainer.optimizer, trainer.model)
        folder = checkpoint.step_folder(run, progress.step)
        checkpoint.save(folder, trainer.model.state_dict(), asdict(progress), tensors)
        checkpoint.prune(run, trainer.config.train.keep)
        tell(trainer, run, "running", progress)
    trainer.world.barrier()


def tell(trainer: Trainer, run: Path, state: str, progress: Progress) -> None:
    """Say in status.json what becomes of the run."""
    if trainer.world.leads:
        write_json(run / "status.json", {"state": state, **asdict(progress)})


def choose_final(trainer: Trainer, run: Path, dev: DevSet, progress: Progress, tracker: Tracker) -> None:
    """Compare the average of the kept checkpoints with the best one on the whole dev set; the winner is `final`."""
    folders = [path for path in checkpoint.saved_steps(run) if checkpoint.fault(path) is None]
    candidates = {f"average of {len(folders)}": folders}
    if checkpoint.fault(run / "best") is None:
        candidates[f"best (step {progress.best_step:,})"] = [run / "best"]
    scores: dict[str, float] = {}
    chosen: dict[str, Tensor] = {}
    for name, members in candidates.items():
        weights = checkpoint.average_folders(members)
        trainer.model.load_state_dict(weights)
        if trainer.config.optim.stop_on == "bleu" and trainer.config.train.validate_sentences:
            score, _ = translate_dev(trainer, dev, len(dev.src))
        else:
            score = -dev_loss(trainer, dev.data)[0]
        if not scores or score > max(scores.values()):
            chosen = weights
        scores[name] = score
    if not chosen:
        raise NmtError(f"no checkpoint in {run} is whole; nothing can be made final.")
    table = ", ".join(f"{name}: {score:.2f}" for name, score in scores.items())
    tracker.say(f"train: on the whole dev set, {table}")
    if trainer.world.leads:
        best = max(scores, key=scores.__getitem__)
        checkpoint.save(run / "final", chosen, {"made_of": best, "dev_scores": scores, "step": progress.step})
        for left_over in run.glob(".*.part"):
            shutil.rmtree(left_over, ignore_errors=True)
    trainer.world.barrier()
