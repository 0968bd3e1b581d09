"""How fast nmt is, and its peers on the same work, in turns: training, decoding, preparation, start-up.

    python scripts/bench.py train --size small --split FOLDER [--peers VENVS --drivers FOLDER --with marian fairseq ...]
    python scripts/bench.py decode --run RUN --split FOLDER [...]
    python scripts/bench.py prepare --split FOLDER
    python scripts/bench.py start --run RUN

FOLDER has train, dev and test as line-aligned text (`--src en --tgt zh` are the ends of their names). Each round runs
every contestant once, nmt first; the table has medians over the rounds with the smallest and the largest. Tokens are
real source and target tokens, counted by their ids: one for each piece and one for the end of a sentence, no padding.
Memory is the largest sum of proportional set sizes (PSS) over all processes of a contestant. VENVS/NAME/bin/python is
the environment of a peer; drivers run it through its own entry points. Results are added to --out, a line each.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
sys.path.insert(0, str(SRC))

# It loads no torch, whose pages would be shared with what is measured.
from nmt.distributed.launcher import die_with_parent, family  # noqa: E402

execute = partial(subprocess.run, check=True, preexec_fn=die_with_parent)
"""Runs a command to a good end; it ends with this process, even if that is killed."""

SIZES = {
    # The peers' limit of 4,096 counts padded slots of the longer side; so many real tokens give equally many pairs.
    "small": ["model.layers=3", "model.d_model=256", "model.d_ff=1024", "model.heads=4"],
    "base": ["model.layers=6", "model.d_model=512", "model.d_ff=2048", "model.heads=8"],
}
RECIPE = [
    *("bpe.vocab_size=8000", "bpe.character_coverage=0.9995", "model.norm_order=post", "model.dropout=0.1"),
    *("model.attention_dropout=0.1", "optim.schedule=inverse_sqrt", "optim.learning_rate=1e-3"),
    *("optim.warmup_steps=400", "train.batch_tokens=3890", "runtime.device_tokens=1300"),
    *("train.validate_sentences=0", "train.early_stop_metric=loss", "runtime.log_every=1000000"),
]


# ── contestants, in turns ───────────────────────────────────────────────────────────────────────────────────────────


def in_turns(contestants: dict[str, Callable[[], dict]], rounds: int, out: Path) -> dict[str, list[dict]]:
    """Each contestant once a round; what each measured is kept at once."""
    found: dict[str, list[dict]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, measure in contestants.items():
            with memory_of_children() as memory:
                result = measure()
            result = {"name": name, "round": number, **result, "pss_mib": round(memory.most)}
            found[name].append(result)
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result), file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[dict]], main: str, columns: Sequence[str]) -> Iterator[str]:
    """A Markdown table: medians, and each contestant's rate over that of each peer, round by round."""
    peers = {name: rates for name, rates in found.items() if not name.startswith("nmt")}
    yield "| | " + " | ".join([main, *(f"over {name}" for name in peers), *columns]) + " |"
    yield "| --- " * (1 + 1 + len(peers) + len(columns)) + "|"
    for name, results in found.items():
        cells = [spread([result[main] for result in results])]
        for peer, rates in peers.items():
            ratios = [one[main] / other[main] for one, other in zip(results, rates, strict=True)]
            cells.append("" if peer == name else spread(ratios))
        for column in columns:
            cells.append(_short(statistics.median(r[column] for r in results)) if column in results[0] else "")
        yield f"| {name} | " + " | ".join(cells) + " |"


def spread(values: Sequence[float]) -> str:
    return f"{_short(statistics.median(values))} ({_short(min(values))} to {_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


class _Memory:
    most = 0.0


@contextmanager
def memory_of_children() -> Iterator[_Memory]:
    """The largest sum of PSS, in MiB, over all processes that descend from this one while the block runs."""
    memory, ended = _Memory(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            memory.most = max(memory.most, sum(map(pss, family(os.getpid())[1:])))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        ended.set()
        thread.join()


def pss(pid: int) -> float:
    try:
        line = next(
            line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().split("\n") if line.startswith("Pss:")
        )
        return int(line.split()[1]) / 1024
    except (OSError, StopIteration):
        return 0.0


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────


def encoded(args: argparse.Namespace, size: str) -> tuple[Path, list[str]]:
    """A folder with the data as nmt makes it from the split, and the words of its settings; made once."""
    split = args.split.resolve()
    files = {part: [f"{split}/{part}.{end}" for end in (args.src, args.tgt)] for part in ("train", "dev", "test")}
    words = [
        *RECIPE,
        *SIZES[size],
        *args.set,
        f"clean.sources={{bench: {json.dumps(files['train'])}}}",
        "data.corpus=bench",
    ]
    words += [f"clean.{part}={json.dumps(files[part])}" for part in ("dev", "test")]
    (args.work / "data" / "bench" / "raw").mkdir(parents=True, exist_ok=True)
    nmt(args, ["run", "--upto", "encode", *sets(words)])
    return args.work, words


def sets(words: Sequence[str]) -> list[str]:
    """Settings as words of a command line; base.yaml is the defaults."""
    return ["-c", "base.yaml"] + [part for word in words for part in ("--set", word)]


def nmt(args: argparse.Namespace, words: Sequence[str]) -> None:
    execute([sys.executable, "-m", "nmt", *words], cwd=args.work, env=environment())


def environment(**more: str) -> dict[str, str]:
    """This environment, with this source tree and no wish about threads but those given here."""
    kept = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return kept | {"PYTHONPATH": str(SRC)} | more


def train_nmt(args: argparse.Namespace, processes: int, words: Sequence[str], *, exchange: bool = True) -> dict:
    """What `nmt train --processes N` does, as it does it, timed between the ends of updates."""
    report = args.work / "report.json"
    command = [str(Path(__file__).resolve()), "_worker", str(report), str(args.warmup), str(int(exchange))]
    command += ["--fresh", *sets([*words, f"train.max_steps={args.warmup + args.updates}"]), "--device", args.device]
    # A single process is launched too: it is a world of one, and gets all cores as threads.
    code = f"import sys; from nmt.distributed.launcher import launch; sys.exit(launch(sys.argv[1:], {processes}))"
    execute([sys.executable, "-c", code, *command], cwd=args.work, env=environment())
    return json.loads(report.read_text())


def worker(report: Path, warmup: int, exchange: bool, words: Sequence[str]) -> None:
    """One process of the training: nmt's own command, with a clock at each update. The first one writes.

    Without `exchange` DDP is told not to synchronise, which shows what the exchange of gradients takes.
    """
    from nmt.cli import main
    from nmt.training import loop

    take_step, rows = loop.train_step, []

    def timed(trainer, *given):
        alone = not exchange and trainer.world.size > 1
        with trainer.parallel.no_sync() if alone else nullcontext():
            stats = take_step(trainer, *given)
        if trainer.world.device.type == "cuda":
            stats.grad_norm.item()
        rows.append((time.perf_counter(), stats))
        if trainer.world.is_main and len(rows) > warmup:
            timed_rows = [stats for _, stats in rows[warmup:]]
            seconds, tokens, count = (
                rows[-1][0] - rows[warmup - 1][0],
                sum(s.tokens for s in timed_rows),
                len(timed_rows),
            )
            found = {"tokens_s": tokens / seconds, "tokens_update": tokens / count, "s_update": seconds / count}
            found["padding"] = sum(s.padding for s in timed_rows) / count
            found |= {f"s_{k}": round(sum(s.seconds[k] for s in timed_rows) / count, 4) for k in stats.seconds}
            report.write_text(json.dumps(found))
        return stats

    loop.train_step = timed
    sys.argv = ["nmt", "train", *words]
    main()


def train_peer(args: argparse.Namespace, name: str) -> dict:
    """One round of a peer by its driver, which counts the ids that pass the embedding."""
    out = args.work / "peer.jsonl"
    out.unlink(missing_ok=True)
    needs = {"PEERS": args.peers, "DATA": args.work / "peers", "RUN": args.work / f"peers-{args.size}", "OUT": out}
    more = {"SIZE": args.size, "ROUNDS": 1, "UPDATES": args.updates, "WARMUP": args.warmup, "LIMIT": 600}
    asked = {key: str(value) for key, value in (needs | more).items()}
    execute(["bash", str(args.drivers / "bench_train.sh"), name], env=environment(**asked))
    result = json.loads(out.read_text().strip().split("\n")[-1])
    keys = {"real_tok_s": "tokens_s", "real_tok_per_update": "tokens_update", "padding_share": "padding"}
    return {new: result[old] for old, new in keys.items()} | {"s_update": result["seconds"] / result["updates"]}


def prepare_peers(args: argparse.Namespace) -> None:
    """The split as pieces of one vocabulary, and each peer's configuration; made once."""
    data, run = args.work / "peers", args.work / f"peers-{args.size}"
    python = str(args.peers / "base" / "bin" / "python")
    if not (data / "stats.json").exists():
        links = args.work / "split"
        links.mkdir(exist_ok=True)
        for part in ("train", "dev", "test"):
            for end, plain in ((args.src, "en"), (args.tgt, "zh")):
                link = links / f"{part}.{plain}"
                link.unlink(missing_ok=True)
                link.symlink_to(args.split.resolve() / f"{part}.{end}")
        execute([python, str(args.drivers / "prepare_data.py"), "--in", str(links), "--out", str(data)])
    if not (run / "ready").exists():
        run.mkdir(exist_ok=True)
        made = [str(args.drivers / "make_configs.py"), "--data", str(data), "--out", str(run), "--size", args.size]
        execute([python, *made])
        if "fairseq" in args.peer:
            words = (data / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
            (run / "dict.txt").write_text("".join(f"{word} 1\n" for word in words), encoding="utf-8")
            preprocess = [str(args.peers / "fairseq" / "bin" / "fairseq-preprocess"), "-s", "en", "-t", "zh"]
            preprocess += ["--trainpref", f"{data}/train.sp", "--validpref", f"{data}/dev.sp"]
            preprocess += ["--testpref", f"{data}/test.sp", "--destdir", f"{run}/fairseq-bin"]
            preprocess += ["--srcdict", f"{run}/dict.txt", "--joined-dictionary"]
            execute(preprocess, stdout=subprocess.DEVNULL)
        (run / "ready").touch()


def train(args: argparse.Namespace) -> None:
    """Updates of a training: nmt as its command does them, peers by their own commands."""
    _, words = encoded(args, args.size)
    contestants: dict[str, Callable[[], dict]] = {}
    for precision, processes in itertools.product(args.precision, args.processes):
        name, given = f"nmt, {processes} processes, {precision}", [*words, f"train.precision={precision}"]
        contestants[name] = lambda processes=processes, given=given: train_nmt(args, processes, given)
    if args.peer:
        prepare_peers(args)
    for name in args.peer:
        contestants[name] = lambda name=name: train_peer(args, name)
    found = in_turns(contestants, args.rounds, args.out)
    parts = ["tokens_update", "padding", "pss_mib", "s_update", "s_data", "s_forward", "s_backward", "s_optimizer"]
    print(*table(found, "tokens_s", parts), sep="\n")


# ── decoding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode(args: argparse.Namespace) -> None:
    """Beam 4 on the test set: a trained run at real lengths, or random weights and a forced length."""
    run = args.run.resolve() if args.run else untrained(args)
    lines = (args.split / f"test.{args.src}").read_text(encoding="utf-8").split("\n")[:-1]
    lines = lines[:: max(1, len(lines) // args.limit)][: args.limit]
    source, pieces = args.work / "decode.src", args.work / "decode.pieces"
    source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if args.peer:
        cut_into_pieces(run, lines, args.src, pieces)
        converted = args.work / "ctranslate2"
        python = str(args.peers / "hf" / "bin" / "python")
        execute([python, str(ROOT / "scripts" / "to_ctranslate2.py"), str(run), str(converted)])
    contestants: dict[str, Callable[[], dict]] = {}
    for precision in args.precision:
        contestants[f"nmt, {precision}"] = lambda precision=precision: decode_nmt(args, run, source, precision)
    for name in args.peer:
        contestants[name] = lambda name=name: decode_peer(args, name, pieces, converted)
    found = in_turns(contestants, args.rounds, args.out)
    main = "tokens_s" if args.forced else "sentences_s"
    print(*table(found, main, ["seconds", "pss_mib"]), sep="\n")


def untrained(args: argparse.Namespace) -> Path:
    """A run of this size after one tiny update."""
    _, words = encoded(args, args.size)
    name = f"untrained-{args.size}"
    small = sets([*words, "train.max_steps=1", "train.batch_tokens=64", "translate.alpha=1.0"])
    nmt(args, ["train", "--name", name, "--device", "cpu", *small, "--set", "translate.length_penalty=power"])
    return args.work / "runs" / name


def cut_into_pieces(run: Path, lines: Sequence[str], language: str, out: Path) -> None:
    """The lines as the run's own tokenizer cuts them, for peers that take pieces."""
    import sentencepiece

    from nmt.corpus import Normaliser

    normalise = Normaliser.load(run / "normalisation.json")
    cutter = sentencepiece.SentencePieceProcessor(model_file=str(run / "tokenizer" / "joint.model"))
    rows = cutter.encode([normalise(line, language).strip() for line in lines], out_type=str)
    out.write_text("".join(" ".join(row) + "\n" for row in rows), encoding="utf-8")


def decode_nmt(args: argparse.Namespace, run: Path, source: Path, precision: str) -> dict:
    report, count = args.work / "report.json", source.read_bytes().count(b"\n")
    words = [str(run), str(source), str(args.forced), str(args.batch), precision, str(report)]
    command = [sys.executable, str(Path(__file__).resolve()), "_decode", *words]
    execute(command, env=environment(), cwd=args.work)
    return _rates(json.loads(report.read_text())["seconds"], count, args.forced)


def _rates(seconds: float, sentences: int, forced: int) -> dict:
    found = {"sentences_s": sentences / seconds, "seconds": seconds}
    return found | ({"tokens_s": sentences * forced / seconds} if forced else {})


def decode_worker(run: Path, source: Path, forced: int, batch: int, precision: str, report: Path) -> None:
    """Load, translate a few lines, then all of them by the clock."""
    from dataclasses import replace

    from nmt.decoding.options import Options
    from nmt.decoding.translator import Translator
    from nmt.runs.run_dir import read_config

    # The rule to stop and the length penalty that the peers have.
    peers = {"beam": 4, "alpha": 1.0, "length_penalty": "power", "beam_patience": 1.0}
    settings = replace(read_config(run).translate, batch_tokens=batch, precision=precision, **peers)
    translator = Translator.load(run, settings, device="cpu")
    # The others count no eos: N tokens are N steps of the search, in which nmt finds N - 1 and eos.
    lines, options = source.read_text(encoding="utf-8").split("\n")[:-1], Options(max_length=max(0, forced - 1))
    list(translator.stream(lines[:8], options))
    start = time.perf_counter()
    list(translator.stream(lines, options))
    report.write_text(json.dumps({"seconds": time.perf_counter() - start}))


def decode_peer(args: argparse.Namespace, name: str, pieces: Path, converted: Path) -> dict:
    """ct2 and ct2-int8 with the very same weights; marian with random ones (give --forced)."""
    kind, _, compute = name.partition("-")
    words = [kind, "--src", str(pieces), "--batch", "64", "--threads", str(len(os.sched_getaffinity(0)))]
    if kind == "ct2":
        words += ["--model", str(converted), "--inter", str(len(os.sched_getaffinity(0)))]
        words += ["--compute", compute or "float32"]
    else:
        words += ["--size", args.size]
    words += ["--min-len", str(args.forced), "--max-len", str(args.forced)] if args.forced else []
    command = [str(args.peers / "hf" / "bin" / "python"), str(args.drivers / "decode_peer.py"), *words]
    done = execute(command, env=environment(), capture_output=True, text=True)
    result = json.loads(done.stdout.strip().split("\n")[-1])
    return _rates(result["seconds"], result["sentences"], args.forced)


# ── preparation and start-up ────────────────────────────────────────────────────────────────────────────────────────


def prepare(args: argparse.Namespace) -> None:
    """clean, bpe and encode of the split, by the command, from nothing."""

    def once() -> dict:
        for old in (args.work / "data" / "bench").glob("*-*"):
            shutil.rmtree(old)
        start = time.perf_counter()
        encoded(args, "small")
        seconds = time.perf_counter() - start
        pairs = sum(1 for _ in (args.split / f"train.{args.src}").open("rb"))
        return {"seconds": seconds, "pairs_s": pairs / seconds}

    print(*table(in_turns({"nmt run --upto encode": once}, args.rounds, args.out), "pairs_s", ["seconds"]), sep="\n")


def start(args: argparse.Namespace) -> None:
    """How long a command takes that has almost nothing to do."""

    def timed(*words: str) -> dict:
        start = time.perf_counter()
        command = [sys.executable, "-m", "nmt", *words]
        execute(command, cwd=args.work, env=environment(), input=b"Hello.\n", stdout=subprocess.DEVNULL)
        return {"seconds": time.perf_counter() - start}

    contestants: dict[str, Callable[[], dict]] = {"nmt --help": lambda: timed("--help")}
    if args.run:
        contestants["nmt translate, one line"] = lambda: timed("translate", "--run", str(args.run.resolve()))
    print(*table(in_turns(contestants, args.rounds, args.out), "seconds", []), sep="\n")


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    if sys.argv[1:2] == ["_worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1", sys.argv[5:])
        return
    if sys.argv[1:2] == ["_decode"]:
        run, source, forced, batch, precision, report = sys.argv[2:]
        decode_worker(Path(run), Path(source), int(forced), int(batch), precision, Path(report))
        return
    args = parsed(sys.argv[1:])
    args.work.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        about = {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": platform.platform(), "command": sys.argv[1:]}
        file.write(json.dumps(about) + "\n")
    args.act(args)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """What the words of a command line mean; ends the program where they mean nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for act in (train, decode, prepare, start):
        command = commands.add_parser(act.__name__, help=(act.__doc__ or "").split(".")[0])
        command.set_defaults(act=act)
        command.add_argument("--split", type=Path, metavar="FOLDER", help="text as train.en, train.zh, dev.en, ...")
        command.add_argument("--src", default="en", metavar="END", help="end of the source files' names")
        command.add_argument("--tgt", default="zh", metavar="END")
        command.add_argument("--work", type=Path, default=ROOT / "runs" / "bench", metavar="FOLDER")
        command.add_argument("--out", type=Path, metavar="FILE")
        command.add_argument("--rounds", type=int, default=5)
        command.add_argument("--size", choices=SIZES, default="small")
        command.add_argument("--set", action="append", default=[], metavar="section.key=value", help="of nmt")
        command.add_argument("--peers", type=Path, metavar="VENVS")
        command.add_argument("--drivers", type=Path, metavar="FOLDER")
        command.add_argument("--with", dest="peer", nargs="*", default=[], metavar="PEER")
        if act in (train, decode):
            command.add_argument("--precision", nargs="+", default=["float32"], help="of nmt: float32, bfloat16")
        if act is train:
            command.add_argument("--device", default="cpu")
            command.add_argument("--updates", type=int, default=8)
            command.add_argument("--warmup", type=int, default=3)
            command.add_argument("--processes", type=int, nargs="*", default=[len(os.sched_getaffinity(0))])
        if act in (decode, start):
            command.add_argument("--run", type=Path, help="a finished run; without it decode takes random weights")
        if act is decode:
            command.add_argument("--forced", type=int, default=0, metavar="N", help="every search has at most N steps")
            command.add_argument("--limit", type=int, default=1000, metavar="N", help="sentences of the test set")
            command.add_argument("--batch", type=int, default=4096, help="nmt's translate.batch_tokens")
    args = parser.parse_args(words)
    if args.split is None and args.act is not start:
        parser.error("give --split, the folder of the text")
    if args.act is decode and args.forced == 1:
        parser.error("--forced is at least 2: one step is eos")
    if args.peer and not (args.peers and args.drivers):
        parser.error("--with needs --peers and --drivers")
    if args.act is train and args.warmup < 1:
        parser.error("--warmup is at least 1: the clock starts at the end of an update")
    args.work = args.work.resolve()
    args.out = args.out or args.work / f"{args.command}.jsonl"
    return args


if __name__ == "__main__":
    main()
