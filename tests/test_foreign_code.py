"""No file that nmt reads can run code: nothing unpickles, and a pickle under any of our names is only a broken file."""

import ast
import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from forked import forked, nmt

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))

MODULES = ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle",
           "torch.package", "torch.hub", "torch.distributed.checkpoint", "torch.distributed.rpc")  # fmt: skip
"""What may not be imported or reached by attributes."""

CALLS = ("torch.load", "torch.save", "torch.jit.load", "torch.export.load", "torch.distributed.all_gather_object",
         "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "os.system", "os.popen", "builtins.eval",
         "builtins.exec")  # fmt: skip

NAMES = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
         "recv_object_list", "read_pickle", "unsafe_load")  # fmt: skip
"""What may not be called, whatever it belongs to: these unpickle."""


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; what is not a name at its root has a `?` there."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def full_names(tree: ast.Module) -> Callable[[ast.expr], str]:
    """How to spell out a name by what the file imports: `t.load` is `torch.load` after `import torch as t`."""
    known: dict[str, str] = {"eval": "builtins.eval", "exec": "builtins.exec"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def full(node: ast.expr) -> str:
        first, *rest = dotted(node).split(".")
        return ".".join([known.get(first, first), *rest])

    return full


def dangers(source: str) -> Iterator[str]:
    """What in a source file could run code that a file brings along."""
    tree = ast.parse(source)
    full = full_names(tree)
    for node in ast.walk(tree):
        named = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            named = [full(node)]
        yield from (name for name in named if any(f"{name}.".startswith(f"{module}.") for module in MODULES))
        yield from (name for name in named if name in CALLS or name.split(".")[-1] in NAMES)
        if not isinstance(node, ast.Call):
            continue
        called, given = full(node.func), {word.arg: word.value for word in node.keywords}
        if called in CALLS or called.split(".")[-1] in NAMES:
            yield called
        if called == "yaml.load" and "SafeLoader" not in ast.unparse(node):
            yield ast.unparse(node)
        if isinstance(shell := given.get("shell"), ast.Constant) and shell.value:
            yield "shell=True"
        if called == "numpy.load":
            allowed = given.get("allow_pickle")
            if not isinstance(allowed, ast.Constant) or allowed.value is not False:
                yield "numpy.load without allow_pickle=False"
        elif "allow_pickle" in given and ast.unparse(given["allow_pickle"]) != "False":
            yield "allow_pickle"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import dill as d",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x', weights_only=True)",
        "from torch import load\nload('x')",
        "from torch.jit import load\nload('x')",
        "import torch\nf = torch.save",
        "import torch\ntorch.export.load('x')",
        "import torch\ntorch.hub.load('x', 'y')",
        "from torch.distributed import checkpoint",
        "from torch import distributed\ndistributed.broadcast_object_list([])",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.save('x', y, allow_pickle=True)",
        "import yaml\nyaml.load(x, Loader=yaml.Loader)",
        "import yaml\nyaml.unsafe_load(x)",
        "eval('1')",
        "exec('1')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "import os\nos.system('x')",
    ],
)
def test_this_test_sees_what_it_forbids(source):
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import json\njson.load(x)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import yaml\nyaml.load(x, Loader=yaml.SafeLoader)\nyaml.safe_load(x)",
        "import subprocess\nsubprocess.run(['x'], shell=False)",
    ],
)
def test_this_test_lets_pass_what_is_safe(source):
    assert not list(dangers(source))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_nothing_in_the_source_runs_what_a_file_brings_along(path):
    assert list(dangers(path.read_text(encoding="utf-8"))) == []


# ── pickles under our names ─────────────────────────────────────────────────────────────────────────────────────────


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def pickles(marker: Path) -> dict[str, bytes]:
    """The payload as text and as bytes, as torch saves it, and in an array of numpy."""
    archive, array = io.BytesIO(), io.BytesIO()
    torch.save(Payload(marker), archive)
    np.save(array, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    return {
        "text": pickle.dumps(Payload(marker), protocol=0),
        "bytes": pickle.dumps(Payload(marker), protocol=4),
        "torch": archive.getvalue(),
        "numpy": array.getvalue(),
    }


def test_the_payload_would_run_if_anything_unpickled_it(tmp_path):
    for form, content in pickles(tmp_path / "ran").items():
        match form:
            case "torch":
                torch.load(io.BytesIO(content), weights_only=False)
            case "numpy":
                np.load(io.BytesIO(content), allow_pickle=True)
            case _:
                pickle.loads(content)
        (tmp_path / "ran").rmdir()


RUN = "runs/tiny.en-zh"
TRANSLATE = ("translate", "in.txt", "-o", "out.txt", "--run", RUN)
GO_ON = ("train", "-c", "tiny.yaml", "--set", "train.max_steps=9")
WALK = ("run", "-c", "tiny.yaml")

# The file, whether the manifest beside it is made to agree, what is done, and how that ends.
PLACES = [
    *((f"{RUN}/final/{name}", agrees, TRANSLATE, 1)
      for name in ("model.safetensors", "state.json") for agrees in (False, True)),
    (f"{RUN}/final/manifest.json", False, TRANSLATE, 1),
    (f"{RUN}/final/optimizer.safetensors", False, TRANSLATE, 1),
    *((f"{RUN}/checkpoints/step-00000008/{name}", False, GO_ON, 0)
      for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")),
    *((f"{RUN}/checkpoints/step-00000008/{name}", True, ("average", RUN, "--last", "1"), 1)
      for name in ("model.safetensors", "state.json")),
    (f"{RUN}/best/model.safetensors", False, GO_ON, 0),
    (f"{RUN}/tokenizer/joint.model", False, TRANSLATE, 1),
    (f"{RUN}/normalisation.json", False, TRANSLATE, 1),
    (f"{RUN}/config.json", False, TRANSLATE, 1),
    (f"{RUN}/config.json", False, ("info", RUN), 1),
    (f"{RUN}/metrics.jsonl", False, GO_ON, 0),
    (f"{RUN}/status.json", False, ("info",), 1),
    (f"{RUN}/status.json", False, ("info", RUN), 0),
    (f"{RUN}/stamp.json", False, ("status", "-c", "tiny.yaml"), 0),
    (f"{RUN}/eval/scores.json", False, ("eval", "--run", RUN), 0),
    (f"{RUN}/eval/scores.json", False, ("eval", "--run", RUN, "--against", "scores.pickle"), 2),
    ("data/.hashes.json", False, WALK, 0),
    *((f"data/mini/{folder}/{name}", False, WALK, 0)
      for folder, name in (("clean-*", "stamp.json"), ("clean-*", "normalisation.json"), ("bpe-*", "stamp.json"),
                           ("bpe-*", "joint.model"), ("bpe-*", "verification.json"), ("encode-*", "stamp.json"),
                           ("encode-*", "meta.json"), ("encode-*", "train.en.ids"), ("encode-*", "dev.zh.offsets"),
                           ("encode-*", "train.rows"))),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "agrees", "words", "code"),
    PLACES,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_pickle_under_one_of_our_names_is_never_run(pipeline_run, tmp_path, place, agrees, words, code):
    for form, content in pickles(tmp_path / "ran").items():
        folder = tmp_path / form
        shutil.copytree(pipeline_run, folder)
        (folder / "in.txt").write_text("The cat is here.\n")
        (folder / "scores.pickle").write_bytes(content)
        (path,) = folder.glob(place) if "*" in place else [folder / place]
        path.write_bytes(content)
        if agrees:
            files = [file for file in path.parent.iterdir() if file.name != "manifest.json"]
            hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
            (path.parent / "manifest.json").write_text(json.dumps(hashes))
        ended = nmt(folder, *words)
        assert not (tmp_path / "ran").exists()
        assert ended.code == code, ended.told
        assert "Traceback" not in ended.told
        if code == 1:
            assert len(ended.told.strip().split("\n")) <= 3, ended.told


@pytest.mark.parametrize("form", ["text", "bytes", "torch", "numpy"])
@pytest.mark.parametrize("name", ["train.en.ids", "dev.zh.offsets", "train.rows", "meta.json"])
def test_encoded_data_that_is_a_pickle_is_refused_where_no_stage_looks_first(pipeline_run, tmp_path, name, form):
    from nmt.data.dataset import open_dataset
    from nmt.errors import DataError

    (encoded,) = pipeline_run.glob("data/mini/encode-*")
    shutil.copytree(encoded, tmp_path / "encoded")
    (tmp_path / "encoded" / name).write_bytes(pickles(tmp_path / "ran")[form])

    def read() -> None:
        with pytest.raises(DataError, match="run nmt encode"):
            open_dataset(tmp_path / "encoded", name.split(".")[0] if name != "meta.json" else "train", "en", "zh")

    ended = forked(read)
    assert ended.code == 0, ended.told
    assert not (tmp_path / "ran").exists()
