"""What all tests share: one torch thread for each process, and the way to corpora that are not part of the project."""

import os
from pathlib import Path

# Before torch is imported anywhere: two processes with two spinning threads each are far slower than with one.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# How fast a machine is, and what else it does, is nothing that a test may fail for.
settings.register_profile("nmt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nmt")


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
