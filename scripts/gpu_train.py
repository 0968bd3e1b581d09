"""The part of check_gpu.py that trains a recipe on real data, to BLEU."""

import hashlib
import json
import shutil
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

from gpu_report import Report, Setting, recipe
from nmt.data.dataset import open_dataset
from nmt.data.tokenizer import load_tokenizers
from nmt.decoding.translator import Translator
from nmt.evaluation.metrics import bleu
from nmt.io import read_lines
from nmt.runs.identity import TrainPaths
from nmt.training.loop import Progress, train_model, updates
from nmt.training.step import Trainer, prepare, train_step


def train(report: Report, at: Setting) -> None:
    """Recipe cmn for as many steps as the time allows: training, validation, choice of the final model, BLEU."""
    config = recipe(
        "cmn.yaml", *(("bpe.vocab_size=300", "train.validate_sentences=3") if at.tiny else ()), tiny=at.tiny
    )
    found = brought(at.data, config.bpe.vocab_size)
    if found is None:
        report.add("skipped", f"no data in {at.data}: bring what `nmt encode -c cmn.yaml` makes, clean to encode")
        return
    clean, bpe, encode = found
    report.add("data", str(encode))
    src, tgt = config.data.src, config.data.tgt
    with tempfile.TemporaryDirectory() as folder:
        paths = TrainPaths(clean=clean, bpe=bpe, encode=encode, run=Path(folder) / "run")
        tokenizers = load_tokenizers(bpe, src, tgt)
        trainer = Trainer.build(config, at.world, (len(tokenizers[0]), len(tokenizers[1])))
        pairs = open_dataset(encode, "train", src, tgt)
        stream = islice(enumerate(updates(config, paths, pairs, tokenizers, Progress()), 1), 6 if at.tiny else 150)
        begun, first = time.perf_counter(), 2 if at.tiny else 20
        for step, (data, update, _) in stream:
            train_step(trainer, prepare(trainer, data, update), step)
            if step == first:
                at.wait()
                begun = time.perf_counter()
        at.wait()
        each = (time.perf_counter() - begun) / (step - first)
        report.add("a step", 1e3 * each, "ms")
        # A third of the time is for validation, the choice of the final model and the test set.
        steps = 8 if at.tiny else max(100, min(config.train.max_steps, int(0.67 * at.left / each)))
        config = replace(
            config,
            optim=replace(config.optim, warmup_steps=min(config.optim.warmup_steps, steps // 4)),
            train=replace(config.train, max_steps=steps, validate_every=-(-steps // 4), save_every=max(1, steps // 12)),
        )
        begun = time.perf_counter()
        try:
            train_model(config, paths, at.world)
            report.add(f"{steps:,} steps with validation", time.perf_counter() - begun, "s")
            begun = time.perf_counter()
            hyps = Translator.load(paths.run, device=str(at.device)).translate(read_lines(clean / f"test.{src}"))
            report.add(f"translation of {len(hyps):,} test sentences", time.perf_counter() - begun, "s")
            score = bleu(hyps, [[ref] for ref in read_lines(clean / f"test.{tgt}")], tgt)
            report.add("test BLEU", score.value, score.signature)
        finally:
            if (paths.run / "metrics.jsonl").exists():
                shutil.copyfile(paths.run / "metrics.jsonl", at.out / "train-metrics.jsonl")


def brought(data: Path, vocab: int) -> tuple[Path, Path, Path] | None:
    """The clean, bpe and encode folders in `data` that belong together and have so many pieces, if there are any."""

    def made_of(stage: str, name: str, sha256: str | None) -> Path | None:
        folders = [path for path in sorted(data.glob(f"{stage}*")) if (path / name).is_file()]
        same = (path for path in folders if hashlib.sha256((path / name).read_bytes()).hexdigest() == sha256)
        return next(same, None)

    for encode in sorted(data.glob("encode*")):
        if not (encode / "stamp.json").is_file():
            continue
        reads = json.loads((encode / "stamp.json").read_text(encoding="utf-8"))["reads"]
        sizes = json.loads((encode / "meta.json").read_text(encoding="utf-8"))["vocab_size"]
        clean = made_of("clean", "train.en", reads.get("clean/train.en"))
        bpe = made_of("bpe", "joint.model", reads.get("bpe/joint.model"))
        if clean and bpe and set(sizes) == {vocab}:
            return clean, bpe, encode
    return None
