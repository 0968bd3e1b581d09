"""What all tests share: one torch thread for each process, and the way to corpora that are not part of the project."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# Before torch is imported anywhere: two processes with two spinning threads each are far slower than with one.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# How fast a machine is, and what else it does, is nothing that a test may fail for.
settings.register_profile("nmt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nmt")


HANG = 900
"""Seconds after which a test hangs; the longest takes a fifth of that on a busy machine."""


class Hang(BaseException):
    """A test that would never end. No Exception, so that nobody catches it, such as Hypothesis to run it again."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a test that hangs, by its name, so that the others still run."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Hang(f"{item.nodeid} has not ended within {HANG} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(HANG)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def foreign_data() -> Path:
    """The folder of corpora that tests use from where they lie; set NMT_TEST_DATA to it."""
    folder = os.environ.get("NMT_TEST_DATA")
    if not folder:
        pytest.skip("NMT_TEST_DATA is not set: this test needs corpora that are not part of the project")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    """The corpus of a tiny training, made once for each process of the tests."""
    from tiny import make_corpus

    return make_corpus(tmp_path_factory.mktemp("tiny"))


RECIPE = """
data: {corpus: mini}
clean: {dev_size: 40, test_size: 60}
bpe: {vocab_size: 1200}
model: {layers: 1, d_model: 32, d_ff: 64, heads: 2}
optim: {warmup_steps: 4}
train: {batch_tokens: 1000, max_steps: 8, validate_every: 4, validate_sentences: 4, save_every: 4}
runtime: {device_tokens: 1000, log_every: 1}
translate: {beam: 1, max_length_offset: 4}
eval: {bootstrap: 0}
"""


@pytest.fixture(scope="session")
def pipeline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny.yaml` whose street was walked once; copy it before changing anything."""
    from forked import nmt

    folder = tmp_path_factory.mktemp("walked")
    shutil.copytree(Path(__file__).parent.parent / "data/mini/raw", folder / "data/mini/raw")
    (folder / "tiny.yaml").write_text(RECIPE)
    ended = nmt(folder, "run", "-c", "tiny.yaml")
    assert ended.code == 0, ended.told
    return folder
