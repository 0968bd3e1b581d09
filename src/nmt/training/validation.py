"""How good a model is by now: loss and BLEU of the dev set, and which weights a training ends with."""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nmt.config import Config, TranslateConfig
from nmt.corpus import Normaliser
from nmt.data.dataset import ParallelDataset, open_dataset
from nmt.data.tokenizer import Tokenizer
from nmt.decoding.translator import Translator
from nmt.distributed import gpu_defaults
from nmt.distributed.world import World, gpu_of
from nmt.errors import CheckpointError
from nmt.evaluation.metrics import bleu
from nmt.io import read_lines
from nmt.runs import checkpoint
from nmt.runs.identity import TrainPaths
from nmt.runs.run_dir import RunDir
from nmt.training.metrics_logger import MetricsLogger
from nmt.training.step import Trainer, dev_loss

log = logging.getLogger(__name__)

FLOAT32 = 4
"""Bytes of a number of the model that is trained."""

SHOWN = 5
"""Sentences of the dev set whose translations are shown at each validation."""


@dataclass(frozen=True)
class Progress:
    """The position of a training; with weights and optimizer state, all that resuming needs."""

    step: int = 0
    epoch: int = 0
    window: int = 0
    """Of the pairs of this epoch; see nmt.data.batching.windows."""
    update: int = 0
    """Updates of this window that are done."""
    best_score: float | None = None
    """Of the dev set, higher is better: BLEU, or minus the loss."""
    best_step: int = 0
    bad_validations: int = 0
    """Validations since the best one."""
    skipped: int = 0
    """Steps skipped because of a non-finite gradient."""
    device_tokens: int = 0
    """How updates were cut by `runtime.device_tokens: auto`; 0 if it was not asked."""
    loss_scale: float = 0.0
    """What float16 multiplies the loss by, 0 in other precisions; and the steps since that was changed."""
    scale_steps: int = 0


@dataclass(frozen=True)
class DevSet:
    """The dev set as ids for the loss and as text for BLEU, and what text is translated with."""

    data: ParallelDataset
    src: list[str]
    tgt: list[str]
    tokenizers: tuple[Tokenizer, Tokenizer]
    normaliser: Normaliser

    @staticmethod
    def load(
        config: Config, paths: TrainPaths, tokenizers: tuple[Tokenizer, Tokenizer], *, verify: bool = True
    ) -> "DevSet":
        """The dev set that a training with these settings and folders looks at; `verify` as in open_dataset."""
        src, tgt = config.data.src, config.data.tgt
        return DevSet(
            open_dataset(paths.encode, "dev", src, tgt, verify=verify),
            read_lines(paths.clean / f"dev.{src}"),
            read_lines(paths.clean / f"dev.{tgt}"),
            tokenizers,
            Normaliser.load(paths.clean / "normalisation.json"),
        )


def translate_dev(trainer: Trainer, dev: DevSet, sentences: int) -> tuple[float, list[str]]:
    """BLEU on raw text, and the translations, of the first `sentences`; every process translates a share.

    The search is greedy whatever the settings of `translate` are: those may be changed for a model that is trained, so
    they must not decide which model that is. The sentences are shared out in the batches that one process would make,
    so that each meets the same neighbours, and not even the rounding of its scores differs.
    """
    world, lines = trainer.world, dev.src[:sentences]
    share = partial(share_among, world) if world.size > 1 else None
    # Process 0's GPU says for all how much is translated at once: the batches must be the same on all of them.
    wanted = TranslateConfig(beam=1, batch_tokens=trainer.config.translate.batch_tokens)
    tokens = gpu_defaults.translate_tokens(wanted, trainer.config.model, FLOAT32, gpu_of(world.device))
    greedy = replace(wanted, batch_tokens=int(world.broadcast([tokens])[0]))
    config = replace(trainer.config, translate=greedy)
    translator = Translator(trainer.model, *dev.tokenizers, dev.normaliser, config, world.device, share)
    trainer.at("translating the dev set")
    trainer.model.eval()
    hyps = translator.translate(lines)
    trainer.model.train()
    score = bleu(hyps, [[ref] for ref in dev.tgt[:sentences]], trainer.config.data.tgt).value if world.is_main else 0.0
    return world.broadcast([score])[0], hyps


def share_among(world: World, tasks: int, work: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """Each task's number and what `work` gives for it, done in turn by all processes and told to all as JSON."""
    mine = [(task, work(task)) for task in range(world.rank, tasks, world.size)]
    for theirs in world.gather(json.dumps(mine).encode()):
        yield from json.loads(theirs)


def validate(trainer: Trainer, dev: DevSet, progress: Progress, tracker: MetricsLogger) -> Progress:
    """Measure the dev set, show a few translations, and note whether it is the best so far."""
    started, sentences = time.perf_counter(), trainer.config.train.validate_sentences
    loss, nll = dev_loss(trainer, dev.data)
    values = {"loss": loss, "nll": nll, "ppl": math.exp(min(nll, 20))}
    score, hyps = -loss, list[str]()
    if sentences:
        values["bleu"], hyps = translate_dev(trainer, dev, sentences)
        values["sentences"] = len(hyps)
        if trainer.config.train.early_stop_metric == "bleu":
            score = values["bleu"]
    tracker.log_scalars("dev", progress.step, values | {"seconds": time.perf_counter() - started})
    if hyps:
        tracker.log_translations(progress.step, list(zip(dev.src, dev.tgt, hyps, strict=False))[:SHOWN])
    if progress.best_score is None or score > progress.best_score:
        return replace(progress, best_score=score, best_step=progress.step, bad_validations=0)
    return replace(progress, bad_validations=progress.bad_validations + 1)


def whole_dev_score(trainer: Trainer, dev: DevSet) -> tuple[str, float]:
    """What a final model is chosen by, higher is better: its name, and its value on the whole dev set."""
    if trainer.config.train.early_stop_metric == "bleu" and trainer.config.train.validate_sentences:
        return "BLEU", translate_dev(trainer, dev, len(dev.src))[0]
    return "minus the loss", -dev_loss(trainer, dev.data)[0]


def choose_final(trainer: Trainer, run: RunDir, dev: DevSet, progress: Progress, tracker: MetricsLogger) -> None:
    """Compare the average of the kept checkpoints with the best one on the whole dev set; the winner is `final`.

    The leader alone reads them; the others get each candidate from it, and score their share.
    """
    world, candidates = trainer.world, dict[str, Sequence[Path]]()
    with world.all_or_none():
        if world.is_main:
            candidates = candidates_of(run, progress)
    scores: dict[str, float] = {}
    chosen: dict[str, Tensor] = {}
    names = list(candidates)
    for number in range(int(world.broadcast([len(names)])[0])):
        weights: dict[str, Tensor] = {}
        with world.all_or_none():
            if world.is_main:
                weights = checkpoint.average_folders(candidates[names[number]])
                trainer.model.load_state_dict(weights)
        world.spread(trainer.model.state_dict().values())
        what, score = whole_dev_score(trainer, dev)
        if world.is_main:
            if not scores or score > max(scores.values()):
                chosen = weights
            scores[names[number]] = score
    if world.is_main:
        best = max(scores, key=scores.__getitem__)
        table = ", ".join(f"{name} has {score:.2f}" for name, score in scores.items())
        tracker.say(f"train: {what} on the whole dev set: {table}; final is the {best}")
        for folder in (run.average, run.former_final):  # They belong to the final model before this one.
            shutil.rmtree(folder, ignore_errors=True)
        checkpoint.save(run.final, chosen, {"made_of": best, "dev_scores": scores, "step": progress.step})
    world.barrier()


def candidates_of(run: RunDir, progress: Progress) -> dict[str, Sequence[Path]]:
    """What a final model may be made of: names, and the folders that are averaged. Raises if none is whole."""
    folders = [path for path in checkpoint.saved_steps(run) if checkpoint.fault(path) is None]
    found: dict[str, Sequence[Path]] = {f"average of {len(folders)}": folders} if folders else {}
    if checkpoint.fault(run.best) is None:
        found[f"best (step {progress.best_step:,})"] = [run.best]
    if not found:
        raise CheckpointError(f"no checkpoint in {run} is whole; start over with nmt train --fresh.")
    return found
