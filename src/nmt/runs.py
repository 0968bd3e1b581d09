"""Run folders as a user looks at them: which is the newest, and what is in one."""

import os
from pathlib import Path
from typing import Any

from nmt.errors import CheckpointError
from nmt.pipeline import read_json
from nmt.provenance import as_trained, read_config, tokenizer_files
from nmt.sizes import parameters

RUNS = Path(os.environ.get("NMT_RUNS") or "runs")
"""Where all runs are. The variable is for doctor, whose trainings leave the user's runs alone."""


def newest_run() -> Path:
    """The run whose training finished last; raises CheckpointError where none has."""
    finished = [path for path in RUNS.glob("*/status.json") if read_json(path).get("state") == "finished"]
    if not finished:
        raise CheckpointError(f"no finished training in {RUNS}/; make one (nmt run -c demo) or name a run with --run.")
    return max(finished, key=lambda path: path.stat().st_mtime_ns).parent


def run_table(facts: dict[str, Any]) -> dict[str, Any]:
    """What `describe_run` found, for people: each score as one text, names without underscores."""
    test = {score["name"]: f"{score['value']:.2f} ({score['signature']})" for score in facts["test"].values()}
    return {name.replace("_", " "): value for name, value in (facts | {"test": test}).items()}


def describe_run(run: Path) -> dict[str, Any]:
    """What a run is: its state, its scores, its vocabulary and sizes."""
    config, status = read_config(run), read_json(run / "status.json")
    vocab = [sum(1 for _ in path.open("rb")) for path in tokenizer_files(run / "tokenizer") if path.suffix == ".vocab"]
    sizes = dict(zip(config.clean.columns, vocab * 2 if len(vocab) == 1 else vocab, strict=False))
    weights = parameters(
        config.model, sizes.get(config.data.tgt, 0), None if config.bpe.shared_vocab else sizes.get(config.data.src, 0)
    )
    scores = read_json(run / "eval" / "scores.json").get("scores")
    final = read_json(run / "final" / "state.json")
    return {
        "run": str(run),
        "recipe": config.recipe,
        "corpus": config.data.corpus,
        "direction": config.direction,
        "precision": as_trained(config, run).train.precision,
        "state": status.get("state", "unknown"),
        "step": status.get("step"),
        "best_dev_score": status.get("best_score"),
        "best_step": status.get("best_step"),
        "final_model": final.get("made_of"),
        "test": {
            metric: {key: score.get(key) for key in ("name", "value", "mean", "interval", "signature")}
            for metric, score in (scores if isinstance(scores, dict) else {}).items()
            if isinstance(score, dict) and isinstance(score.get("value"), float)
        },
        "vocabulary": sizes,
        "parameters": sum(weights.values()),
        "bytes": sum(path.stat().st_size for path in run.rglob("*") if path.is_file()),
    }
