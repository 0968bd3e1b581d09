"""The site: its reference is the code, the paper's page quotes the code, the tutorial shows what is printed, and every
link of what is built leads somewhere."""

import difflib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer

import nmt
from nmt import config as settings
from nmt.cli import app
from test_docs import PAGES, PAPER, ROOT, blocks, prose, read, shell_commands, spans

DOCS = ROOT / "docs"
TRANSLATED = sorted(path.name for path in (DOCS / "zh").glob("*.md"))


def load_reference() -> Any:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = load_reference()

# ── the reference ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_reference_has_every_setting_with_its_kind() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| .* \| (\w+) \| (.+) \|$", reference.settings(), re.M)
    wanted = [
        (f"{name}.{key}", kind)
        for name, section in settings.SECTIONS.items()
        for key, kind in settings.kinds(section).items()
    ]
    assert [(name, kind) for name, kind, _ in rows] == wanted
    assert all(len(sentence) > 10 for _, _, sentence in rows)


def test_a_row_of_the_reference_is_what_the_schema_says() -> None:
    (row,) = re.findall(r"^\| `model.position`.*$", reference.settings(), re.M)
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
    assert cells[2:5] == [r"`sinusoidal \| learned \| rope`", "`sinusoidal`", "result"]
    assert cells[5] == settings.sentences(settings.SECTIONS["model"])["position"]


def test_the_reference_has_every_command_with_all_of_its_options() -> None:
    parts = re.split(r"^## ", reference.commands(), flags=re.M)[1:]
    texts = {part.split("\n", 1)[0]: part for part in parts}

    def look(command: Any, words: list[str]) -> None:
        text = texts.pop(" ".join(words))
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                name = (
                    parameter.opts[0]
                    if parameter.param_type_name == "option"
                    else parameter.metavar or parameter.name.upper()
                )
                assert name in text, f"{words}: {name}"
        for name, below in getattr(command, "commands", {}).items():
            look(below, [*words, name])

    look(typer.main.get_command(app), ["nmt"])
    assert not texts


def test_the_reference_has_every_public_name_of_python() -> None:
    text = reference.python()
    for name in nmt.__all__:
        assert f"## nmt.{name}\n" in text
        assert (inspect.getdoc(getattr(nmt, name)) or "").split("\n")[0] in text
    assert "### Translator.translate\n" in text
    assert "0x" not in text


def test_a_page_gets_what_its_mark_names() -> None:
    marked = {page: reference.MARK.findall(read(page)) for page in PAGES}
    assert sorted(name for names in marked.values() for name in names) == sorted(reference.GENERATORS)
    assert reference.fill("a\n<!-- generated: python -->\nb") == f"a\n{reference.python()}\nb"


# ── the paper, line by line ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_code_that_a_page_gives_is_in_the_code(page: str) -> None:
    for span in spans(page):
        if re.fullmatch(r"nmt(\.\w+)+", span) and not (ROOT / span).exists():
            assert reference.find(span) is not None, f"{page}: {span}"


def quotes(page: str) -> list[tuple[str, str]]:
    """Each quoted piece of code with the name that stands last before it."""
    found, name = list[tuple[str, str]](), ""
    for named, code in re.findall(r"^`(nmt[\w.]+)`$|^```python\n(.*?)^```$", read(page), re.M | re.DOTALL):
        name = named or name
        if code:
            found.append((name, code.rstrip("\n")))
    return found


@pytest.mark.parametrize("page", PAPER)
def test_every_line_that_the_page_of_the_paper_quotes_stands_where_it_says(page: str) -> None:
    found = quotes(page)
    assert len(found) > 25
    for name, code in found:
        place = reference.find(name)
        assert place is not None, name
        line = place.line_of(code)
        near = difflib.get_close_matches(code, [text.strip() for text in place.source.split("\n")], 1, 0.3)
        assert line is not None, f"{page}: {code!r} is not in {name}; quote the line that does this now, perhaps {near}"
        path = ROOT / "src" / f"{place.module.replace('.', '/')}.py"
        path = path if path.is_file() else path.with_suffix("") / "__init__.py"
        assert path.read_text(encoding="utf-8").split("\n")[line - 1].strip() == code.strip()


def test_a_line_that_is_no_longer_in_the_code_is_noticed() -> None:
    place = reference.find("nmt.training.optimizer.learning_rate")
    assert place is not None
    assert place.line_of("rate = 0.1") is None
    assert reference.find("nmt.training.optimizer.no_such_function") is None
    assert reference.find("nmt.no_such_module.function") is None


def test_both_pages_of_the_paper_have_the_same_formulas_and_lines() -> None:
    english, chinese = PAPER
    assert quotes(english) == quotes(chinese)
    formulas = [re.findall(r"\$\$.+?\$\$", read(page), re.DOTALL) for page in PAPER]
    assert formulas[0] == formulas[1]
    assert len(formulas[0]) >= 9


@pytest.mark.parametrize("page", PAPER)
def test_base_and_big_have_the_hyper_parameters_of_the_paper(page: str) -> None:
    rows = re.findall(r"^\| [^|]+ \| `(\w+)\.(\w+)` \| ([\w.-]+) \| ([\w.-]+) \|$", prose(page), re.M)
    assert len(rows) == 16
    for column, recipe in ((2, "base"), (3, "big")):
        config = settings.load(recipe)
        for row in rows:
            assert getattr(getattr(config, row[0]), row[1]) == float(row[column]), f"{recipe}: {row}"


# ── two languages ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_page_in_both_languages_has_the_same_code_and_links_to_the_other(name: str) -> None:
    english, chinese = f"docs/{name}", f"docs/zh/{name}"
    assert shell_commands(english) == shell_commands(chinese)
    code = [
        [block for block in blocks(page) if block.language in ("text", "yaml", "python")] for page in (english, chinese)
    ]
    assert code[0] == code[1]
    assert f"[中文](zh/{name})" in read(english)
    assert f"[English](../{name})" in read(chinese)


def test_both_glossaries_have_the_same_terms() -> None:
    def terms(page: str, first: int) -> set[tuple[str, ...]]:
        rows = [[cell.strip() for cell in line.split("|")] for line in read(page).split("\n") if line.startswith("| ")]
        return {(row[first], row[3 - first]) for row in rows if row[3] != "---"} - {("term", "中文"), ("英文", "中文")}

    assert terms("docs/glossary.md", 1) == terms("docs/zh/glossary.md", 2)
    assert len(terms("docs/glossary.md", 1)) > 60


# ── what the tutorial shows ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_tutorial_shows_what_the_commands_print(tmp_path: Path) -> None:
    """Of the commands before the training, whose output is the same on every machine."""
    pieces = re.findall(
        r"^```sh\n(nmt (?:clean|bpe|encode|plan) -c demo)\n```\n\n```text\n(.*?)^```$",
        read("docs/tutorial.md"),
        re.M | re.DOTALL,
    )
    assert [line.split()[1] for line, _ in pieces] == ["clean", "bpe", "encode", "plan"]
    for line, shown in pieces:
        words = [sys.executable, "-m", *line.split()]
        printed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300).stdout
        for part in shown.split("...\n"):
            assert part in printed, f"{line}: {part}"


# ── the site as it is built ─────────────────────────────────────────────────────────────────────────────────────────


class Page(HTMLParser):
    """What a page links to, what it loads by itself, and the targets that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.loads, self.ids = set[str](), set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            (self.loads if tag == "link" else self.links).add(given["href"])
        if "src" in given:
            self.loads.add(given["src"])


def build(source: Path, output: Path, builder: str = "html") -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "sphinx", "-E", "-W", "--keep-going", "-q", "-b", builder]
    return subprocess.run(
        [*words, "-c", str(DOCS), str(source), str(output)], capture_output=True, text=True, check=False, timeout=600
    )


needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="the extra `docs` is not installed; make docs does it"
)


@pytest.mark.slow
@needs_sphinx
def test_the_site_builds_without_a_warning_and_all_of_its_links_lead_somewhere(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in tmp_path.rglob("*.html")}
    sources = {f"source/{name.replace('.', '/')}.html" for name in reference.source_files(ROOT / "src/nmt")}
    assert {tmp_path / name for name in ("index.html", "zh/paper.html", *sources)} <= pages.keys()
    for path, page in pages.items():
        for target in page.links | page.loads:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                # Nothing is fetched from elsewhere when a page is read.
                assert target not in page.loads or parts.scheme == "data", f"{path}: {target}"
                continue
            found = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert found.exists(), f"{path}: {target}"
            if parts.fragment and found in pages:
                assert unquote(parts.fragment) in pages[found].ids, f"{path}: {target}"
    paper = pages[tmp_path / "paper.html"]
    assert sum("source/nmt/" in link and "#line-" in link for link in paper.links) > 30
    assert "<math" in (tmp_path / "paper.html").read_text(encoding="utf-8")
    assert 'lang="zh-CN"' in (tmp_path / "zh/index.html").read_text(encoding="utf-8")


@pytest.mark.slow
@needs_sphinx
def test_the_build_fails_on_links_that_lead_nowhere(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns("_build", "zh"))
    with open(source / "tutorial.md", "a", encoding="utf-8") as page:
        page.write("\n[1](no-such-page.md), [2](guide.md#no-such-heading), [3](#no-such-target)\n")
    done = build(source, tmp_path / "built", "dummy")
    assert done.returncode != 0
    for lost in ("no-such-page", "no-such-heading", "no-such-target"):
        assert lost in done.stderr
