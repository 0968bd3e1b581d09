"""Checkpoints that somebody made to do harm: refused, or as good as a real one; never a crash, never much memory."""

import json
import os
import random
import resource
import shutil
import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from forked import forked
from nmt.config import Config, ModelConfig, OptimConfig
from nmt.errors import CheckpointError
from nmt.model.transformer import Transformer
from nmt.runs import checkpoint
from nmt.training.optimizer import build_optimizer

CONFIG = Config(model=ModelConfig(layers=1, d_model=8, d_ff=8, heads=2))
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
ROOM = 512 << 20
"""Bytes of memory that reading may ask for, beyond what the process has."""


@dataclass(frozen=True)
class Progress:
    step: int
    score: float | None


def model_and_optimizer() -> tuple[Transformer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer(CONFIG.model, 10)
    return model, build_optimizer(model, OptimConfig())


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = checkpoint.step_folder(tmp_path_factory.mktemp("good"), 7)
    model, optimizer = model_and_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = checkpoint.optimizer_tensors(optimizer, model)
    checkpoint.save(folder, model.state_dict(), {"step": 7, "score": 1.5}, tensors)
    return folder


# ── mutations ───────────────────────────────────────────────────────────────────────────────────────────────────────


def flip(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 4, 40))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(raw: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(raw))
    return raw[:start] + (raw[rng.randrange(start, len(raw)) :] if rng.random() < 0.5 else b"")


def insert(raw: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw))
    return raw[:at] + rng.randbytes(rng.choice((1, 8, 1000))) + raw[at:]


def repeat(raw: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(raw))
    end = rng.randrange(start, len(raw))
    return raw[:end] + raw[start:end] + raw[end:]


def claim(raw: bytes, rng: random.Random) -> bytes:
    """Another header length."""
    sizes = (
        0,
        1,
        2,
        len(raw),
        len(raw) - 8,
        100_000_000,
        2**31,
        2**40,
        2**63 - 1,
        2**63,
        2**64 - 1,
        rng.getrandbits(64),
    )
    return struct.pack("<Q", rng.choice(sizes)) + raw[8:]


def rewrite_header(raw: bytes, rng: random.Random) -> bytes:
    """A header that is valid JSON and wrong."""
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    name = rng.choice([key for key in header if key != "__metadata__"])
    other = rng.choice([key for key in header if key != "__metadata__"])
    start, end = header[name]["data_offsets"]
    text = None
    match rng.randrange(12):
        case 0:
            header[name]["data_offsets"] = [start + rng.choice((-8, -4, 4, 8)), end]
        case 1:
            header[name]["data_offsets"] = header[other]["data_offsets"]
        case 2:
            header[name]["data_offsets"] = [end, start]
        case 3:
            header[name]["data_offsets"] = [0, 2 ** rng.choice((31, 40, 62))]
        case 4:
            header[name] |= {"shape": [2**40], "data_offsets": [start, start + 2**42]}
        case 5:
            header[name]["shape"] = rng.choice(([], [-1], [0], [2**63], [1] * 1000, ["a"], None, [2**32, 2**32], [1.5]))
        case 6:
            header[name]["dtype"] = rng.choice(("F64", "F16", "I8", "BOOL", "F8_E4M3", "F4", "C64", "X", None, 3))
        case 7:
            header[rng.choice(("", "__metadata__", "x" * 100_000, "../x", "\x00"))] = header.pop(name)
        case 8:
            del header[name]
        case 9:
            header["__metadata__"] = rng.choice(({"a": 1}, [], {"a": "b" * 10_000}, None))
        case 10:
            text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[other])}}}"
        case 11:
            text = "[" * 200_000
    encoded = (text or json.dumps(header)).encode()
    return struct.pack("<Q", len(encoded)) + encoded + raw[8 + size :]


def rewrite_json(raw: bytes, rng: random.Random) -> bytes:
    """JSON that is valid and wrong, or nearly JSON."""
    found = json.loads(raw)
    name = rng.choice(list(found))
    values = (None, True, -1, 1e999, "x", [], {}, 2**70, 10**400, float("nan"), "../x", [[]], dict(found))
    found[rng.choice((name, name, "more", "../x", ""))] = rng.choice(values)
    if rng.random() < 0.3:
        del found[name]
    text = json.dumps(found)
    odd = (
        "9" * 10_000,
        "[" * 100_000,
        '{"a":' * 100_000,
        text + text,
        text[:-1] + f', "{name}": 0}}',
        "",
        "null",
        "[]",
    )
    return (text if rng.random() < 0.6 else rng.choice(odd)).encode(rng.choice(("utf-8", "utf-8", "utf-16", "utf-32")))


def mutate(folder: Path, rng: random.Random, *, manifest_agrees: bool) -> str:
    """Change one or two files of a checkpoint; says how."""
    done = []
    for name in rng.sample(FILES[:3] if manifest_agrees else FILES, rng.choice((1, 1, 2))):
        special = [claim, rewrite_header, rewrite_header] if name.endswith("safetensors") else [rewrite_json] * 3
        change = rng.choice([flip, cut, insert, repeat, *special])
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(change(raw, rng))
        done.append(f"{name} {change.__name__}")
    if manifest_agrees:
        hashes = {name: sha256((folder / name).read_bytes()).hexdigest() for name in FILES[:3]}
        (folder / "manifest.json").write_text(json.dumps(hashes))
    return ", ".join(done)


def bound_memory() -> None:
    """Let reading have so much memory and no more, as address space too."""
    with open("/proc/self/statm") as stream:
        size = int(stream.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))


@pytest.mark.slow
@pytest.mark.parametrize("manifest_agrees", [False, True], ids=["the manifest as it was", "a manifest that agrees"])
def test_a_thousand_mutated_checkpoints_are_refused_or_as_good_as_a_real_one(good, tmp_path, manifest_agrees):
    before = {name: (good / name).read_bytes() for name in FILES}
    weights, state = checkpoint.load(good)
    moments = checkpoint.load_optimizer(good)
    run = tmp_path / "run"
    folder = checkpoint.step_folder(run, 7)

    def read_them_all() -> None:
        # In a child: a crash of native code would end it, and so would memory that isn't there.
        bound_memory()
        counts = {"refused": 0, "taken": 0}
        for seed in range(1000):
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(good, folder)
            how = mutate(folder, random.Random(seed), manifest_agrees=manifest_agrees)
            if all((folder / name).read_bytes() == raw for name, raw in before.items()):
                continue
            model, optimizer = model_and_optimizer()
            try:
                checkpoint.load_newest(run, model, optimizer, Progress)
                loaded = model.state_dict()
                restored = checkpoint.optimizer_tensors(optimizer, model)
                for found, real in ((loaded, weights), (restored, moments)):
                    assert found.keys() == real.keys(), how
                    assert all(found[name].shape == real[name].shape for name in real), how
                    assert all(found[name].dtype == real[name].dtype for name in real), how
                    if not manifest_agrees:
                        assert all(torch.equal(found[name], real[name]) for name in real), how
                assert manifest_agrees or checkpoint.load(folder)[1] == state, how
                counts["taken"] += 1
            except CheckpointError:
                counts["refused"] += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {how}") from error
            # What translates reads the weights alone.
            try:
                checkpoint.build_model(CONFIG, checkpoint.load(folder)[0])
            except CheckpointError:
                pass
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {how}, build_model") from error
        os.write(2, json.dumps(counts).encode())

    ended = forked(read_them_all)
    assert ended.code == 0, ended.told[-3000:]
    counts = json.loads(ended.told.split("\n")[-1])
    assert sum(counts.values()) > 950
    if not manifest_agrees:
        assert counts["taken"] < 50  # Whitespace in the manifest's JSON, or a repeated key, changes nothing.


@pytest.mark.parametrize("length", [2**40, 2**63 - 1, 2**64 - 1])
def test_a_header_that_promises_terabytes_gets_no_memory(good, tmp_path, length):
    shutil.copytree(good, tmp_path / "c")
    raw = (good / "model.safetensors").read_bytes()
    (tmp_path / "c" / "model.safetensors").write_bytes(struct.pack("<Q", length) + raw[8:])
    hashes = {name: sha256((tmp_path / "c" / name).read_bytes()).hexdigest() for name in FILES[:3]}
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(hashes))

    def read() -> None:
        bound_memory()
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            checkpoint.load(tmp_path / "c")

    ended = forked(read)
    assert ended.code == 0, ended.told
