"""`nmt` in the process of the tests, and a run folder with a model that knows five sentences by heart.

Thousands of command lines are cheap this way. What the command line doesn't answer itself goes up as it would in a
shell, where it is a traceback.
"""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import sentencepiece
import torch
from torch.nn.utils.rnn import pad_sequence

from nmt.cli import main
from nmt.config import Config, ModelConfig, TranslateConfig, to_dict
from nmt.corpus import Normaliser
from nmt.data.tokenizer import Tokenizer
from nmt.model.loss import label_smoothed_loss
from nmt.model.transformer import Transformer
from nmt.runs import checkpoint
from nmt.special_tokens import BOS, EOS, PAD

KNOWN = {
    "The cat sat on the mat.": "猫坐在垫子上。",
    "I do not know what you mean.": "我不知道你是什么意思。",
    "Where is my red book?": "我的红书在哪里？",
    "Run!": "快跑！",
    "He left at 5 p.m.": "他下午五点走了。",
}


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: bytes
    told: str

    @property
    def lines(self) -> list[str]:
        """The lines of stdout, each of which must have its LF."""
        assert self.out.endswith(b"\n") or not self.out
        return self.out.decode().split("\n")[:-1]


def nmt(*words: str, stdin: bytes = b"") -> Ended:
    """Run `nmt` here; any exception that is not the end of the process goes up."""
    streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", newline="\n") for data in (stdin, b"", b"")]
    new = {"argv": ["nmt", *words], "stdin": streams[0], "stdout": streams[1], "stderr": streams[2]}
    with mock.patch.multiple(sys, **new), _same_process():
        try:
            main()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
    assert isinstance(code, int)
    told = streams[2].buffer.getvalue().decode()  # type: ignore[attr-defined]
    return Ended(code, streams[1].buffer.getvalue(), told)  # type: ignore[attr-defined]


@contextmanager
def _same_process() -> Iterator[None]:
    """Gives back what `main` takes of a process: the root logger and the answer to SIGTERM."""
    root, own = logging.getLogger(), logging.getLogger("nmt")
    kept, root.handlers, levels, answer = root.handlers, [], (root.level, own.level), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        root.handlers = kept
        root.setLevel(levels[0])
        own.setLevel(levels[1])
        signal.signal(signal.SIGTERM, answer)


def nmt_process(*words: str, cwd: Path, stdin: bytes = b"", **environment: str) -> Ended:
    """Run `nmt` as a shell does."""
    done = subprocess.run(
        [sys.executable, "-m", "nmt", *words],
        input=stdin,
        capture_output=True,
        cwd=cwd,
        env=os.environ | environment,
        check=False,
        timeout=300,
    )
    return Ended(done.returncode, done.stdout, done.stderr.decode())


def write_run(run: Path) -> Path:
    """The folder of a finished training, English to Chinese, of a model that knows KNOWN."""
    pieces = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([*KNOWN, *KNOWN.values()] * 3), model_writer=pieces, vocab_size=400, model_type="bpe",
        pad_id=0, unk_id=1, bos_id=2, eos_id=3, character_coverage=1.0, byte_fallback=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
    )  # fmt: skip
    tokenizer = Tokenizer(pieces.getvalue(), "joint.model")
    config = Config(
        model=ModelConfig(layers=1, d_model=32, d_ff=64, heads=2, dropout=0.0),
        translate=TranslateConfig(beam=2, max_length_offset=8),
    )
    torch.manual_seed(1)
    model = Transformer(config.model, len(tokenizer))
    _learn_by_heart(model, tokenizer)
    (run / "tokenizer").mkdir(parents=True)
    (run / "tokenizer" / "joint.model").write_bytes(pieces.getvalue())
    Normaliser("simplified", {"en": False, "zh": True}).save(run / "normalisation.json")
    (run / "config.json").write_text(json.dumps(to_dict(config)), encoding="utf-8")
    (run / "status.json").write_text('{"state": "finished"}', encoding="utf-8")
    checkpoint.save(run / "final", model.state_dict(), {"step": 1})
    return run


def _learn_by_heart(model: Transformer, tokenizer: Tokenizer) -> None:
    def padded(rows: list[list[int]]) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)

    src, tgt = tokenizer.encode(list(KNOWN)), tokenizer.encode(list(KNOWN.values()))
    src_BS, in_BT = padded([[*row, EOS] for row in src]), padded([[BOS, *row] for row in tgt])
    out_BT = padded([[*row, EOS] for row in tgt])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    real_BT = out_BT != PAD
    for _ in range(120):
        hidden_ND = model(src_BS, in_BT)[real_BT]
        loss, _ = label_smoothed_loss(hidden_ND, model.embedding.weight, out_BT[real_BT], 0.0)
        optimizer.zero_grad()
        (loss / len(hidden_ND)).backward()
        optimizer.step()
