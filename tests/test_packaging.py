"""What is shipped: the wheel with its recipes, pinned versions, no trace of a machine."""

import re
import subprocess
import sys
import tomllib
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

    wanted = [*project()["dependencies"], *project()["optional-dependencies"]["dev"]]  # type: ignore[call-overload, index, misc]
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
    for step in ("make setup", "make check", "make test", "make test-slow"):
        assert step in script
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


@pytest.mark.slow
def test_a_wheel_holds_the_recipes_and_they_load_from_it(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    recipes = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
    assert sorted(name.removeprefix("nmt/configs/") for name in names if name.startswith("nmt/configs/")) == recipes
    assert "nmt/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "data/", "runs/"))]
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
