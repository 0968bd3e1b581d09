"""Check nmt on one GPU, a part at a time: `python scripts/check_gpu.py PART`. check_gpu.sh runs all parts.

    correct   the GPU computes what the CPU does: model, gradients, loss, cached decoding, searches
    bfloat16  autocast stays close to float32 and learns
    speed     tokens a second and MFU of the loop that nmt train has, by recipe and default
    decode    lines through Translator with default settings, and the time of a step for one line
    resume    a training that is resumed has the same losses, and with deterministic kernels the same bits
    pairs     ten million pairs: how long until the first step, and what the host does in each
    ranks     two processes on one GPU, by gloo, plain and compiled
    compiled  tokens a second with torch.compile and without
    train     recipe cmn for a minute or two, to BLEU

Each result is written as soon as it is known, as a line of results.jsonl and as a row of results.md, so a part that is
cut off has lost only what it had not measured. `--device cpu --small` runs the same code anywhere in seconds. Nothing
is loaded from a network. What only one part needs may be missing: each part imports its own.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from gpu_report import Report, Setting, explained
from nmt.distributed.world import choose_device

PARTS = {
    "correct": "gpu_correct",
    "bfloat16": "gpu_correct",
    "speed": "gpu_speed",
    "decode": "gpu_speed",
    "resume": "gpu_correct",
    "pairs": "gpu_speed",
    "ranks": "gpu_ranks",
    "compiled": "gpu_speed",
    "train": "gpu_train",
}
"""The module of each part, whose function has the part's name."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one part; 1 if it failed or found something wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--tiny", "--small", action="store_true", help="the smallest form of everything, to test this script"
    )
    parser.add_argument("--seconds", type=float, default=600, help="that the part may take")
    parser.add_argument("--data", type=Path, default=Path("data/cmn"), help="clean, bpe and encode folders for `train`")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="where results go")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out, options.part)
    begun = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        device = choose_device(options.device)
        at = Setting(device, options.tiny, options.seconds, begun, options.data, options.out)
        getattr(import_module(PARTS[options.part]), options.part)(report, at)
    except SystemExit:
        report.add("cut off", f"after {time.perf_counter() - begun:.0f} s", ok=False)
        raise
    except Exception as error:
        report.add("failed", explained(error), ok=False)
        raise
    report.add("done", time.perf_counter() - begun, "s")
    rows = [
        json.loads(line) for line in (options.out / "results.jsonl").read_text(encoding="utf-8").split("\n") if line
    ]
    return int(any(row["part"] == options.part and row["ok"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
