"""What more processes give: tokens a second, the share of the time that goes into exchanging gradients, accumulation.

    python scripts/bench_scaling.py --split FOLDER [--size small] [--processes 1 2 4 8] [--tokens 1024] [--device cpu]

Each process computes micro-batches of `--tokens`, so an update grows with the processes (weak scaling); `--accumulate`
says how many micro-batches each has in an update. Every case runs with and without the exchange, in turns; what the
exchange takes is what is saved without it. gloo on a CPU, NCCL on GPUs. More processes than cores show only that it
works: they wait for each other's cores.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

from bench import ROOT, SIZES, encoded, train_nmt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--src", default="en")
    parser.add_argument("--tgt", default="zh")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=1024, help="token slots of a micro-batch on either side")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    words = encoded(args, args.size)[1]
    cases = [(p, a) for p in args.processes for a in args.accumulate]
    found: dict[tuple[int, int, bool], list[float]] = {}
    for _ in range(args.rounds):
        for processes, accumulate in cases:
            cut = [f"train.batch_tokens={args.tokens * processes * accumulate}", f"runtime.device_tokens={args.tokens}"]
            for exchange in (True, False) if processes > 1 else (True,):
                rate = train_nmt(args, processes, [*words, *cut], exchange=exchange)["tokens_s"]
                found.setdefault((processes, accumulate, exchange), []).append(rate)
                print(
                    f"{processes} processes, {accumulate} micro-batches, exchange {exchange}: {rate:,.0f}",
                    file=sys.stderr,
                )
    print(
        f"{os.uname().nodename}: {len(os.sched_getaffinity(0))} cores, {args.device}, {args.size} model",
        file=sys.stderr,
    )
    titles = ["processes", "micro-batches of each", "tokens/s", "over one process", "without the exchange", "its share"]
    print("| " + " | ".join(titles) + " |")
    print("| ---: " * len(titles) + "|")
    for processes, accumulate in cases:
        rates = found[processes, accumulate, True]
        first = found[args.processes[0], accumulate, True]
        gain = statistics.median(a / b for a, b in zip(rates, first, strict=True))
        without = found.get((processes, accumulate, False), rates)
        share = 1 - statistics.median(a / b for a, b in zip(rates, without, strict=True))
        row = [f"{processes}", f"{accumulate}", f"{statistics.median(rates):,.0f}", f"{gain:.2f}"]
        row += [f"{statistics.median(without):,.0f}", f"{max(0.0, share):.0%}"]
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
