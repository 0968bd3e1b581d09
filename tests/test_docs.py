"""The pages: every command, setting, file and link that they name exists, and every snippet is real code."""

import ast
import dataclasses
import importlib
import itertools
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from nmt import config as settings
from nmt.cli import _general_first, app
from nmt.config import SECTIONS

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "docs/zh/*.md", "data/*.md", "data/mini/*.md", "runs/*.md")
    for path in ROOT.glob(pattern)
)
PAPER = ("docs/paper.md", "docs/zh/paper.md")
"""Their snippets are single lines of the code; tests/test_site.py finds each."""
OTHER_PROGRAMS = {"source", "echo", "tensorboard"}
FILE_ENDINGS = ("py", "sh", "sbatch", "yaml")
HOMES = (
    "",
    "configs",
    "docs",
    "scripts",
    "src/nmt",
    *(path.parent.as_posix() for path in ROOT.glob("src/nmt/*/__init__.py")),
)
"""Where a file that a page names may lie."""


class Block(NamedTuple):
    language: str
    text: str


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    fences = re.findall(r"^```(\S*)\n(.*?)^```$", read(page), re.DOTALL | re.M)
    return [Block(language, text) for language, text in fences]


def prose(page: str) -> str:
    return re.sub(r"^```\S*\n.*?^```$", "", read(page), flags=re.DOTALL | re.M)


def spans(page: str) -> list[str]:
    """What stands between backticks in the prose, on one line or two."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def commands(line: str) -> Iterator[list[str]]:
    """The commands of a shell line as words, without comments, files of redirections and what joins them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>&;")
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter(lexer)
    for token in tokens:
        if token in ("<", ">"):
            next(tokens)
        elif set(token) <= set("|&;"):
            yield words
            words = []
        else:
            words.append(token)
    if words:
        yield words


def shell_commands(page: str) -> list[list[str]]:
    """Every command in the shell blocks of a page."""
    lines = [
        line
        for block in blocks(page)
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").split("\n")
        if line.strip()
    ]
    return [words for line in lines for words in commands(line)]


def inline_commands(page: str) -> list[list[str]]:
    """Commands in the prose that are whole: with an option, and without a word in capitals that stands for others."""
    found = [
        list(commands(span))
        for span in spans(page)
        if re.match(r"(nmt|make|torchrun|python scripts/bench.py) .*-", span)
    ]
    return [
        words for several in found for words in several if not any(re.search(r"\b[A-Z]+\b", word) for word in words)
    ]


def check(words: list[str]) -> None:
    """Raise where the program that a command names would refuse its words."""
    program, *rest = words
    if program == "make":
        assert set(rest) <= set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M)), words
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(rest)
        assert parsed.module
        assert parsed.training_script == "nmt"
        check_nmt(parsed.training_script_args)
    elif program == "nmt":
        check_nmt(rest)
    elif program == "python" and rest[0] in ("scripts/bench.py", "scripts/fixed_split.py", "scripts/make_results.py"):
        runpy.run_path(str(ROOT / words[1]))["parsed"](words[2:])
    else:
        assert program in OTHER_PROGRAMS, words


def check_nmt(words: list[str]) -> None:
    """Let the command line's own parser read the words, and load the settings that they name."""
    words = [word for word in _general_first(words) if word not in ("-q", "--debug")]
    if words == ["--help"]:
        return
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    given = command.make_context("nmt", words).params
    if "config" in given:
        settings.load(given["config"], given["changes"] or ())
    else:
        settings.change(settings.Config(), given.get("changes") or ())


# ── what a page says to type ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_one_that_works(page: str) -> None:
    for words in (*shell_commands(page), *inline_commands(page)):
        try:
            check(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page}: {shlex.join(words)}: {error!r}") from error


@pytest.mark.parametrize(
    "line",
    [
        "nmt trian -c demo.yaml",
        "nmt train --confg base.yaml",
        "nmt train --config bse.yaml",
        "nmt run --set optim.batch_token=1",
        "nmt translate a.txt --set translate.beam=many",
        "make demoo",
        "torchrun --nproc-per-nodes 8 -m nmt train",
        "torchrun --nproc-per-node 8 -m nmt train --config bse.yaml",
        "ntm run",
    ],
)
def test_a_command_that_would_not_work_is_noticed(line: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(next(commands(line)))


def test_the_commands_that_a_user_has_in_mind_are_in_the_readme() -> None:
    lines = [" ".join(words) for words in shell_commands("README.md")]
    for wanted in (
        "make demo",
        "make test",
        "nmt fetch cmn",
        "nmt run -c cmn-small.yaml",
        "nmt train --config base.yaml",
        "nmt eval",
        "torchrun --nproc-per-node 8 -m nmt train --config base.yaml",
    ):
        assert wanted in lines
    assert any(line.startswith("nmt translate ") for line in lines)
    assert "nmt translate" in lines


def test_both_readmes_have_the_same_commands_files_and_numbers() -> None:
    english, chinese = "README.md", "README.zh.md"
    assert shell_commands(english) == shell_commands(chinese)
    assert [block.text for block in blocks(english) if block.language == "python"] == [
        block.text for block in blocks(chinese) if block.language == "python"
    ]

    def numbers(page: str) -> list[str]:
        rows = [line for line in read(page).split("\n") if line.startswith("|")]
        return re.findall(r"\d+(?:\.\d+)?", " ".join(rows))

    assert numbers(english) == numbers(chinese)
    assert tree(english) == tree(chinese)


# ── what a page says there is ───────────────────────────────────────────────────────────────────────────────────────


def tree(page: str) -> list[str]:
    """The files and folders in the annotated tree of a page."""
    text = next(block.text for block in blocks(page) if "├── " in block.text)
    folders = re.findall(r"^[│├└─ ]+([\w/]+/)(?=\s|$)", text, re.M)
    return folders + re.findall(r"[\w-]+\.(?:py|yaml)\b", text)


def test_the_annotated_tree_has_every_module_and_recipe_and_nothing_else() -> None:
    modules = {path.name for path in (ROOT / "src/nmt").glob("*.py") if not path.name.startswith("__")}
    packages = {f"{path.parent.name}/" for path in (ROOT / "src/nmt").glob("*/__init__.py")}
    recipes = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    folders = {"configs/", "data/", "runs/", "docs/", "scripts/", "tests/", "src/nmt/"}
    assert set(tree("README.md")) == modules | packages | recipes | folders


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    named = re.compile(rf"(?<![\w./-])({'|'.join(SECTIONS)})\.([a-z_]+)(?![\w./-])")
    # An example of an error message may name what isn't there.
    told = " ".join(span for span in spans(page) if "did you mean" not in span)
    for section, key in named.findall(told):
        if key not in (*FILE_ENDINGS, "safetensors", "en", "zh"):
            assert key in {field.name for field in dataclasses.fields(SECTIONS[section])}, f"{page}: {section}.{key}"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_the_project_that_a_page_names_exists(page: str) -> None:
    for span in spans(page):
        if re.fullmatch(rf"[\w./-]+\.({'|'.join(FILE_ENDINGS)})", span):
            assert any((ROOT / home / span).is_file() for home in HOMES), f"{page}: {span}"


def test_every_test_that_the_page_of_reliability_names_exists() -> None:
    there = {
        node.name
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    named = [span for span in spans("docs/reliability.md") if re.fullmatch(r"test_\w+(\.\.\.)?", span)]
    assert len(named) > 50
    for span in named:
        start = span.removesuffix("...")
        assert span in there or (start != span and any(name.startswith(start) for name in there)), span


def anchors(page: str) -> set[str]:
    """The names that the headings of a page have as link targets."""
    heads = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(path.resolve().relative_to(ROOT).as_posix()), f"{page}: {target}"


# ── snippets ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", PAGES)
def test_every_recipe_in_a_page_loads(page: str, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            file = tmp_path / "recipe.yaml"
            file.write_text(block.text, encoding="utf-8")
            settings.load(str(file))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in PAPER])
def test_every_python_snippet_compiles_and_uses_what_there_is(page: str) -> None:
    from nmt import Translator

    for block in blocks(page):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), f"{page}: {ast.unparse(node)}"
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("translator", "Translator"):
                assert hasattr(Translator, node.attr), f"{page}: {ast.unparse(node)}"


def test_the_snippets_of_the_style_page_stand_in_the_code() -> None:
    snippets = [block.text for block in blocks("CONTRIBUTING.md") if block.language == "python"]
    assert snippets
    for snippet in snippets:
        where, *lines = snippet.rstrip("\n").split("\n")
        code = read(where.removeprefix("# ")).split("\n")
        spots = [at for at, line in enumerate(code) if line == lines[0]]
        equal = [[one == other for one, other in zip(lines, code[at:], strict=False)] for at in spots]
        longest = max((sum(itertools.takewhile(bool, row)) for row in equal), default=0)
        assert longest == len(lines), f"{where}: {lines[longest]!r} is not what the code has"


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert yaml.safe_load(read("CITATION.cff"))["version"] == version
    newest = re.search(r"^## (\d\S*)", read("CHANGELOG.md"), re.M)
    assert newest is not None
    assert newest[1] == version
