"""doctor: proves on this machine, and with the data at hand, that a training can be trusted.

Each proof does a thing twice, in two ways whose results must be equal, and holds them side by side.
"""

import itertools
import logging
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from nmt.config import Config
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.decoding.options import Options, Translation
from nmt.decoding.translator import Translator
from nmt.diagnostics.trial_runs import COMPARABLE, SAVE_EVERY, STEPS, TrialRuns, hashes, options, read_losses
from nmt.distributed import host
from nmt.distributed.world import choose_device
from nmt.errors import NmtError, counted
from nmt.io import lines_of, read_lines
from nmt.runs import checkpoint
from nmt.runs.run_dir import read_config

log = logging.getLogger(__name__)

LARGEST_LOSS_DIFFERENCE = 1e-5
"""Nats a token. Rounding makes less than 1e-6 of it, a mean taken by each process on its own 1e-3 and more."""

LEAST_EQUAL = 0.999
"""Share of lines. Of thousands, a few may have two translations that are equally good but for rounding."""

LARGEST_SCORE_DIFFERENCE = 1e-3
"""Of a translation's score. A tiny model says much the same of every line; its scores show what its texts may hide."""

LINES, BATCH_MULTIPLE, MOST_TOKENS = 128, 64, 20
"""Lines that are translated, how many of them together, and tokens of the longest translation."""

MOST_TEXT = 10_000
"""Training lines of each language that go through the tokenizer; nmt bpe has proven all of them."""

EDGE_CASES = (
    "", " ", "  two  spaces  ", "\t", "tab\tin it", "\r", "carriage\rreturn", "\x00", "\x07\x1b[0m",
    "\x85\u2028\u2029", "\u3000全角　空格\u3000", "，。！？：；（）“”‘’……——", ",.!?:;()\"'", "ＡＢＣ１２３",
    "①② ½ ﬁ ㈱", "e\u0301 é", "한국어 가", "\u200b\u200d\u2060\ufeff", "\u202eright to left\u202c",
    "שלום مرحبا", "😀👩\u200d👧🇨🇳", "𠀀𪚥", "\ufffd", "\U0010ffff\ufffe", "<s>", "</s>", "<pad>", "<unk>", "<mask/>",
    "<0x41>", "<0xE4><0xBD>", "&amp; <b>bold</b>", "http://a.b/?c=d&e=%20#f", "3.14159 1,000,000 -1e-9",
    "a" * 5000, "的" * 2000, "好 " * 2000,
)  # fmt: skip
"""Lines that a tokenizer may stumble over; U+2581 alone is not among them, for it is how the space is written."""


@dataclass(frozen=True)
class Check:
    """What came of one."""

    outcome: Literal["passed", "failed", "not run"]
    figure: str
    """What was measured, or why it could not be."""
    seconds: float = 0.0


def verdict(holds: bool, figure: str) -> Check:
    """Passed or failed."""
    return Check("passed" if holds else "failed", figure)


# ── what is compared ──────────────────────────────────────────────────────────────────────────────────────────────────


def judge_losses(alone: Sequence[float], shared: Sequence[float], where: str) -> Check:
    """The losses of each step in one process and in two."""
    if not alone or len(alone) != len(shared):
        return verdict(False, f"{counted(len(alone), 'step')} in one process, {len(shared)} in two")
    gaps = [abs(one - two) for one, two in zip(alone, shared, strict=True)]
    holds = all(gap <= LARGEST_LOSS_DIFFERENCE for gap in gaps)  # A loss that is no number is in no bound.
    return verdict(holds, f"losses of {len(gaps)} steps differ by at most {max(gaps):.1e}, {where}")


def judge_translations(lines: int, alone: Sequence[Translation], together: Sequence[Translation]) -> Check:
    """The translations of the same lines, each by itself and many together."""
    if not len(alone) == len(together) == lines:
        return verdict(
            False, f"{counted(lines, 'line')} became {len(alone)} one by one, {len(together)} at batch {BATCH_MULTIPLE}"
        )
    pairs = list(zip(alone, together, strict=True))
    equal = sum(one.text == other.text for one, other in pairs)
    gaps = [abs(one.score - other.score) for one, other in pairs]
    holds = equal >= LEAST_EQUAL * lines and all(gap <= LARGEST_SCORE_DIFFERENCE for gap in gaps)
    return verdict(
        holds, f"{equal} of {lines} texts equal at batch 1 and {BATCH_MULTIPLE}, scores within {max(gaps):.1e}"
    )


def judge_text(lines: Mapping[str, Sequence[str]], back: Mapping[str, Sequence[str]]) -> Check:
    """Text before and after encoding and decoding, by where it is from."""
    changed = [
        (where, number)
        for where, side in lines.items()
        for number, (line, other) in enumerate(itertools.zip_longest(side, back[where]), 1)
        if line != other
    ]
    figure = f"{counted(sum(map(len, lines.values())), 'line')}, {len(changed):,} changed"
    return verdict(
        not changed, figure + (f" (the first is line {changed[0][1]} of {changed[0][0]})" if changed else "")
    )


# ── the proofs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_resume(bench: TrialRuns, chance: random.Random) -> Check:
    """A training that is killed at a random moment and resumed ends with the weights of an uninterrupted one."""
    whole = bench.train("whole")
    for attempt in range(5):
        # After the first checkpoint, and with some steps still to come, so it is seldom over by then.
        if bench.kill(f"killed-{attempt}", chance.randint(SAVE_EVERY + 1, STEPS - SAVE_EVERY), chance.uniform(0, 0.1)):
            break
    else:
        return Check("not run", "the training was always over before it could be killed")
    run = bench.folder / f"killed-{attempt}"
    point, killed = checkpoint.newest(run), len(read_losses(run))
    if point is None:
        return verdict(False, f"killed after step {killed} of {STEPS}: it had no checkpoint")
    told, made = f"killed after step {killed} of {STEPS}", (point / "state.json").stat().st_mtime_ns
    bench.train(run.name)
    if (point / "state.json").stat().st_mtime_ns != made:
        return verdict(False, f"{told}: it restarted instead of resuming from {point.name}")
    there, here = hashes(whole), hashes(run)
    if there == here:
        return verdict(True, f"{told}, resumed from {point.name} with the same weights, SHA-256 {here[0][:12]}")
    old, new = (checkpoint.load(checkpoint.saved_steps(path)[-1])[0] for path in (whole, run))
    gap = max(float((old[name] - new[name]).abs().max()) for name in old)
    return verdict(False, f"{told}: SHA-256 {there[0][:12]} became {here[0][:12]}, weights differ by up to {gap:.1e}")


def check_ranks(bench: TrialRuns, device: torch.device) -> Check:
    """Two processes have the losses of one."""
    backends = host.backends()
    on_gpus = device.type == "cuda" and len(host.gpus()) > 1 and backends["nccl"]
    if not on_gpus and not backends["gloo"]:
        return Check("not run", "this torch has no gloo, which CPU processes talk through")
    words = [*options(COMPARABLE), "--device", "cuda" if on_gpus else "cpu"]
    alone, shared = bench.train("alone", *words), bench.train("shared", *words, processes=2)
    return judge_losses(read_losses(alone), read_losses(shared), "on 2 GPUs" if on_gpus else "on 2 CPU processes")


Translate = Callable[[Sequence[str], int], Sequence[Translation]]
"""Translates lines, so many in each batch."""


def check_decode(translate: Translate, lines: Sequence[str]) -> Check:
    """A line's translation doesn't depend on what is translated with it."""
    return judge_translations(len(lines), translate(lines, 1), translate(lines, BATCH_MULTIPLE))


def at_batch(run: Path, device: str, lines: Sequence[str], size: int) -> list[Translation]:
    """The lines' translations by a run, `size` lines in each batch."""
    settings = replace(read_config(run).translate, batch_tokens=1 if size == 1 else 1 << 30, precision="float32")
    translator = Translator.load(run, settings, device=device)
    translator.together = 1
    return [best for best, *_ in translator.stream(lines, Options(max_length=MOST_TOKENS), window=size)]


def check_tokenizer_round_trip(tokenizers: Mapping[str, Tokenizer], text: Mapping[str, Sequence[str]]) -> Check:
    """Every line comes back from the vocabulary as it was; `text` is by language."""
    text = {name: [*lines, *EDGE_CASES] for name, lines in text.items()}
    return judge_text(text, {name: tokenizers[name].decode(tokenizers[name].encode(text[name])) for name in text})


# ── the whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_checks(config: Config, words: Sequence[str], clean: Path, bpe: Path, device: str) -> dict[str, Check]:
    """All proofs by name, on the data of a recipe; `words` are its options on the command line."""
    languages = config.data.src, config.data.tgt
    text = {language: _some_lines(clean / f"train.{language}", MOST_TEXT) for language in languages}
    text = {language: [*lines, *read_lines(clean / f"dev.{language}")] for language, lines in text.items()}
    # One empty line: it has no translation, and must stay in its place.
    to_translate = [*_some_lines(clean / f"dev.{config.data.src}", LINES), ""]
    # A signal unwinds these blocks like an error: first the training's, which kills, then the folder's, which removes.
    with tempfile.TemporaryDirectory(prefix="nmt-doctor-") as folder:
        bench = TrialRuns(Path(folder), [*words, "--device", device])
        checks: dict[str, Callable[[], Check]] = {
            "resume": partial(check_resume, bench, random.Random()),
            "ranks": partial(check_ranks, bench, choose_device(device)),
            "decode": lambda: check_decode(partial(at_batch, bench.folder / "whole", device), to_translate),
            "tokenizer": lambda: check_tokenizer_round_trip(
                dict(zip(languages, load_tokenizers(bpe, *languages), strict=True)), text
            ),
        }
        return {name: run_check(name, proof) for name, proof in checks.items()}


def _some_lines(path: Path, most: int) -> list[str]:
    with open(path, "rb") as stream:
        return [text for text, _ in itertools.islice(lines_of(stream), most)]


def run_check(name: str, proof: Callable[[], Check]) -> Check:
    """Do one proof and time it; whatever goes wrong in it is its result."""
    log.info("doctor: %s ...", name)
    begun = time.monotonic()
    try:
        found = proof()
    except Exception as error:
        log.debug("doctor: %s", name, exc_info=True)
        found = Check("failed", str(error) if isinstance(error, NmtError) else f"{type(error).__name__}: {error}")
    return replace(found, seconds=round(time.monotonic() - begun, 1))


def lines(checks: Mapping[str, Check]) -> list[str]:
    """The proofs as a table for the terminal."""
    return [f"{name:<10} {proof.outcome:<8} {proof.seconds:6.1f} s  {proof.figure}" for name, proof in checks.items()]
