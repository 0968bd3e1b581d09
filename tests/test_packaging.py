"""What is shipped: the wheel with its recipes, pinned versions, no trace of a machine."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    return dict(line.lower().replace("_", "-").split("==") for line in lines if line)


def test_every_requirement_is_pinned_within_its_range() -> None:
    from packaging.requirements import Requirement

    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *extras["dev"], *extras["docs"]]  # type: ignore[call-overload, index, misc]
    for requirement in map(Requirement, wanted):
        version = pins()[requirement.name.lower()]
        assert requirement.specifier.contains(version), f"{requirement} but {version}"


def test_versions_are_plain_and_name_no_place() -> None:
    assert all(re.fullmatch(r"[0-9a-z.]+", version) for version in pins().values())
    assert pins()["torch"] == "2.13.0"


def test_ci_runs_the_script_that_people_run() -> None:
    assert ".ci/run" in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    for step in ("make setup", "make check", "make docs", "make test", "make test-slow"):
        assert step in script
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def build_wheel(folder: Path) -> Path:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_a_wheel_holds_the_recipes_and_they_load_from_it(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    recipes = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
    assert sorted(name.removeprefix("nmt/configs/") for name in names if name.startswith("nmt/configs/")) == recipes
    assert "nmt/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "data/", "runs/"))]
    shipped = {name.removeprefix("nmt/corpora/") for name in names if name.startswith("nmt/corpora/")}
    assert shipped == {"mini/raw/mini.txt", "mini/LICENSE", "mini/README.md"}
    for name in shipped:
        assert (tmp_path / "site/nmt/corpora" / name).read_bytes() == (ROOT / "data" / name).read_bytes()
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import nmt.config\n"
        f"assert nmt.config.__file__.startswith({str(tmp_path)!r}), nmt.config.__file__\n"
        f"for name in {recipes!r}:\n"
        "    found = nmt.config.find_file(name)\n"
        f"    assert str(found).startswith({str(tmp_path)!r}), found\n"
        "    nmt.config.load(name)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=60)


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo_and_the_doctor_in_an_empty_folder(tmp_path: Path) -> None:
    wheel, python, home = build_wheel(tmp_path), tmp_path / "venv/bin/python", tmp_path / "home"
    venv.create(tmp_path / "venv", symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, timeout=300)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # What nmt depends on is taken from here; a line of a .pth file reads no further .pth files, so not this nmt.
    (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    home.mkdir()

    def nmt(*words: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return subprocess.run(
            [str(tmp_path / "venv/bin/nmt"), *words],
            cwd=home,
            env=env | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            encoding="utf-8",
            check=True,
            timeout=600,
        )

    place = subprocess.run(
        [python, "-c", "import nmt; print(nmt.__file__)"], capture_output=True, text=True, check=True
    )
    assert place.stdout.startswith(str(site))
    short = ["--set", "train.max_steps=8", "--set", "train.validate_every=4", "--set", "eval.bootstrap=20"]
    ran = nmt("run", "-c", "demo", *short, "--json")
    assert f"clean: reading {site}/nmt/corpora/mini/raw/mini.txt" in ran.stderr
    assert json.loads(ran.stdout)["scores"]
    facts = json.loads(nmt("doctor", "--json", "--device", "cpu").stdout)
    assert (facts["passed"], facts["corpus"]) == (True, "mini")
    assert json.loads(nmt("fetch", "mini", "--json").stdout)["licence"] == "CC0 1.0"
    assert (home / "data/mini/raw/mini.txt").read_bytes() == (ROOT / "data/mini/raw/mini.txt").read_bytes()
    # The same text from another place: nothing is out of date.
    states = json.loads(nmt("status", "-c", "demo", *short, "--json").stdout)
    assert {state["state"] for state in states} == {"up_to_date"}
