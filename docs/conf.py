"""The site: Sphinx with Markdown pages (MyST). `make docs` builds it without a network; what is built needs none."""

import html
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx import addnodes
from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

import reference  # noqa: E402

project = "nmt"
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
html_title = f"nmt {release}"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_copyright = html_show_sphinx = html_copy_source = False
exclude_patterns = ["_build"]
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
pygments_dark_style = "monokai"

SOURCES = reference.source_files(ROOT / "src" / "nmt")
SHOWN = "source/{}"
"""The page of a module."""


def setup(app: Sphinx) -> dict[str, Any]:
    """Hooks: reference pages from the code, formulas as MathML, names of code as links to their lines."""
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
    app.connect("source-read", lambda _, page, text: text.__setitem__(0, reference.fill(text[0])))
    app.connect("doctree-resolved", link_to_code)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", say_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# ── formulas ────────────────────────────────────────────────────────────────────────────────────────────────────────


def mathml(formula: str, display: str = "inline") -> str:
    """MathML, which browsers draw themselves; in a Chinese page too with a font for formulas."""
    return convert(formula, display=display).replace("<math ", '<math lang="en" ', 1)


def inline_formula(writer: Any, node: nodes.math) -> None:
    """A formula in a line of text."""
    writer.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def formula(writer: Any, node: nodes.math_block) -> None:
    """A formula on a line of its own."""
    writer.body.append(f'<div class="formula">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


# ── links to the code ───────────────────────────────────────────────────────────────────────────────────────────────


def link_to_code(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Make `nmt.module.name` a link to its line, and of a quoted line below it one to that line.

    A link to a file of the package leads to the page of its source, and to any other file outside of the pages nowhere.
    """
    builder: Any = app.builder
    if builder.format != "html":
        return
    place = None
    for node in list(doctree.findall(lambda n: isinstance(n, nodes.literal | nodes.literal_block))):
        if isinstance(node, nodes.literal):
            name = node.astext()
            if not re.fullmatch(r"nmt(\.\w+)+", name) or isinstance(node.parent, nodes.reference):
                continue
            found = reference.find(name)
            if found and found.module in SOURCES:
                place = found
                node.replace_self(_link(builder, page, place.module, place.line, node.deepcopy()))
        elif place and (line := place.line_of(node.astext().split("\n")[0])):
            words = f"{SOURCES[place.module].relative_to(ROOT).as_posix()}, line {line}"
            link = _link(builder, page, place.module, line, nodes.Text(words))
            at = node.parent.index(node)
            above = node.parent[at - 1]
            if isinstance(above, nodes.paragraph) and len(above) == 1:  # It is the name alone.
                above += [nodes.Text(" · "), link]
            else:
                above = nodes.paragraph("", "", link)
                node.parent.insert(at, above)
            above["classes"].append("place")
    for node in list(doctree.findall(addnodes.download_reference)):
        path = (HERE / node["refdoc"]).parent.joinpath(node["reftarget"]).resolve()
        modules = [module for module, source in SOURCES.items() if source == path]
        if modules:
            node.replace_self(_link(builder, page, modules[0], 1, *node.children))


def _link(builder: Any, page: str, module: str, line: int, *children: nodes.Node) -> nodes.reference:
    uri = f"{builder.get_relative_uri(page, SHOWN.format(module.replace('.', '/')))}#line-{line}"
    return nodes.reference("", "", *children, refuri=uri, internal=True)


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page of each module, with numbered lines that can be linked to."""
    look = HtmlFormatter(linenos="inline", lineanchors="line", anchorlinenos=True, wrapcode=True)
    for module, path in SOURCES.items():
        code = highlight(path.read_text(encoding="utf-8"), PythonLexer(), look)
        title = f"<h1>{html.escape(path.relative_to(ROOT).as_posix())}</h1>"
        body = f"<style>.content {{ width: 64rem }}</style>\n{title}\n{code}"
        yield SHOWN.format(module.replace(".", "/")), {"title": module, "body": body}, "page.html"


def say_language(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Tell browsers which language a page is in, for fonts and line breaks."""
    if page.startswith("zh/"):
        context["language"] = "zh-CN"
