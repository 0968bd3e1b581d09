"""`nmt average`: other final weights for a run that is trained, never worse ones unless asked, and the way back."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from nmt.config import Config
from nmt.data.tokenizer import load_tokenizers
from nmt.distributed.world import World, choose_device
from nmt.errors import CheckpointError, ConfigError, DataError
from nmt.io import read_object
from nmt.runs import checkpoint
from nmt.runs.identity import TrainPaths, as_trained, unchanged
from nmt.runs.run_dir import RunDir, read_config
from nmt.training.step import Trainer
from nmt.training.validation import DevSet, whole_dev_score

MARK = " (nmt average)"
"""How the origin of a final model ends that is an average by hand."""


@dataclass(frozen=True)
class Averaged:
    """What came of it."""

    folder: Path
    """Where the average is."""
    name: str
    measure: str
    """What the scores are, higher is better; empty where nothing was compared."""
    scores: dict[str, float]
    """On the whole dev set, of the average and of the final model."""
    former: bool = False
    """Whether a final model was replaced, and what the training made is kept as `run/final-before`."""


def average_checkpoints(run: RunDir, last: int, output: Path | None, device: str, force: bool) -> Averaged:
    """Average the newest checkpoints into `output`, or into `run/final` if that is better on dev, or with `force`.

    `output` must not exist. Without it, an average that is not better is put into `run/average`. The final model that
    is replaced is kept as `run/final-before`. Who calls this holds the run's lock.
    """
    if output is not None and os.path.lexists(output):
        raise ConfigError(f"{output} exists; give -o a folder that doesn't.")
    config, folders = read_config(run), checkpoint.saved_steps(run)[-last:]
    if not folders:
        raise CheckpointError(f"{run} has no checkpoints; its training makes them (nmt train).")
    for folder in folders:
        if (fault := checkpoint.fault(folder)) is not None:
            raise CheckpointError(f"{fault}; average fewer checkpoints (--last), or train again.")
    weights, name = checkpoint.average_folders(folders), f"average of {len(folders)}"
    state = {"made_of": f"{name}{MARK}", "steps": [checkpoint.step_of(folder) for folder in folders]}
    final, scores, measure = run.final, dict[str, float](), ""
    if output is not None:
        checkpoint.save(output, weights, state)
        return Averaged(output, name, measure, scores)
    before = checkpoint.load(final) if checkpoint.fault(final) is None else None
    if before is not None and not force:
        trainer, dev = _on_dev(config, run, device)
        for which, candidate in ((name, weights), ("final", before[0])):
            trainer.model.load_state_dict(candidate)
            measure, scores[which] = whole_dev_score(trainer, dev)
        if not scores[name] > scores["final"]:
            checkpoint.save(run.average, weights, state | {"dev_scores": scores})
            return Averaged(run.average, name, measure, scores)
    # What the training itself has chosen is what is kept, however many averages follow each other.
    if before is not None and not (str(before[1].get("made_of")).endswith(MARK) and run.former_final.exists()):
        checkpoint.save(run.former_final, *before)
    checkpoint.save(final, weights, state | {"dev_scores": scores})
    return Averaged(final, name, measure, scores, former=before is not None)


def restore_final(run: RunDir) -> None:
    """Restore the final model that an average replaced. Who calls this holds the run's lock."""
    if not run.former_final.exists():
        raise CheckpointError(
            f"{run} has no {run.former_final.name}: no average has taken the place of its final model."
        )
    checkpoint.save(run.final, *checkpoint.load(run.former_final))
    shutil.rmtree(run.former_final)


def _on_dev(config: Config, run: RunDir, device: str) -> tuple[Trainer, DevSet]:
    """A trainer and the dev set that the run was trained with."""
    facts = read_object(run.provenance_file)
    paths = TrainPaths(run=run, **{name: Path(str(facts.get(name))) for name in ("clean", "bpe", "encode")})
    if not unchanged(config, paths):
        raise DataError(
            f"the dev set that {run} was trained with is not in {paths.encode} any more, so the average can't be "
            "compared with its final model. nmt run makes the data again; --force replaces without a comparison, "
            "-o FOLDER puts the average elsewhere."
        )
    config = as_trained(replace(config, runtime=replace(config.runtime, compile=False)), run)
    tokenizers = load_tokenizers(paths.bpe, config.data.src, config.data.tgt)
    sizes = (len(tokenizers[0]), len(tokenizers[1]))
    trainer = Trainer.build(config, World(0, 1, choose_device(device)), sizes)
    return trainer, DevSet.load(config, paths, tokenizers)
