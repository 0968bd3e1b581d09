"""Run folders as a user looks at them: which is the newest, and what is in one."""

from typing import Any

from nmt.io import read_json
from nmt.model.flops import parameters
from nmt.runs.identity import as_trained
from nmt.runs.run_dir import RunDir, read_config


def run_table(facts: dict[str, Any]) -> dict[str, Any]:
    """What `describe_run` found, for people: each score as one text, names without underscores."""
    test = {score["name"]: f"{score['value']:.2f} ({score['signature']})" for score in facts["test"].values()}
    return {name.replace("_", " "): value for name, value in (facts | {"test": test}).items()}


def describe_run(run: RunDir) -> dict[str, Any]:
    """What a run is: its state, its scores, its vocabulary and sizes."""
    config, status = read_config(run), run.status()
    vocab = [sum(1 for _ in path.open("rb")) for path in run.tokenizer_files() if path.suffix == ".vocab"]
    sizes = dict(zip(config.clean.columns, vocab * 2 if len(vocab) == 1 else vocab, strict=False))
    weights = parameters(
        config.model, sizes.get(config.data.tgt, 0), None if config.bpe.shared_vocab else sizes.get(config.data.src, 0)
    )
    scores = read_json(run.scores_file).get("scores")
    final = run.final_state()
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
