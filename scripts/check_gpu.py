"""Check nmt on one GPU, a part at a time: `python scripts/check_gpu.py PART`. check_gpu.sh runs all parts.

    correct   the GPU computes what the CPU does: model, gradients, loss, cached decoding, searches
    bfloat16  autocast stays close to float32 and learns
    speed     training throughput and MFU against a measured matrix peak
    compiled  the same with torch.compile
    decode    beam search at large batches, and the time of a step for one sentence
    resume    going on from a checkpoint gives the same losses
    train     recipe cmn for a minute or two, to BLEU

Each result is written as soon as it is known, as a line of results.jsonl and as a row of results.md, so a part that is
cut off has lost only what it had not measured. `--device cpu --tiny` runs the same code anywhere in seconds.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import gpu_correct
import gpu_speed
from gpu_report import Report, Setting, explained
from nmt.distributed import choose_device


def train(report: Report, at: Setting) -> None:
    """Recipe cmn to BLEU; imported late, so that what it alone needs may be missing elsewhere."""
    import gpu_train

    gpu_train.train(report, at)


PARTS = {
    "correct": gpu_correct.correct,
    "bfloat16": gpu_correct.bfloat16,
    "speed": gpu_speed.speed,
    "compiled": gpu_speed.compiled,
    "decode": gpu_speed.decode,
    "resume": gpu_correct.resume,
    "train": train,
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one part; 1 if it failed or found something wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest form of everything, to test this script")
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
        PARTS[options.part](report, at)
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
