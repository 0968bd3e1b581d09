"""The report of `clean` as a page for the terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from nmt.corpus.rules import RULES

WIDEST = 100
"""Characters of a sample row that are shown."""

MEANINGS = {
    "undecodable": "bytes that are not text in clean.encoding",
    "columns": "not two or three columns",
    **{rule.name: rule.means for rule in RULES},
    "duplicate": "an earlier pair again but for case, width and punctuation",
    "held_out": "a sentence that the given dev or test has",
}
"""Every reason to drop a row, in words."""

_SETTINGS = {rule.name: rule.setting for rule in RULES}


def print_report(report: Mapping[str, Any]) -> list[str]:
    """The lines of the table that `nmt clean` shows: sources, counts, drops with a sample each, sets, script, leaks."""
    return [
        *_sources(report),
        "",
        f"input       {report['input']:>10,}",
        *(
            f"  {lang} changed {count:>8,}  {_share(count, report['input'])}"
            for lang, count in report["changed"].items()
        ),
        *_drops(report),
        f"kept        {report['kept']:>10,}  {_share(report['kept'], report['input'])}",
        *_script(report),
        "",
        *_sets(report),
    ]


def _share(count: int, total: int) -> str:
    return f"{100 * count / max(1, total):.2f} %"


def _sources(report: Mapping[str, Any]) -> Iterable[str]:
    for name, source in report["sources"].items():
        for file in source["files"]:
            yield f"{name}: {file['file']}, {file['lines']:,} rows, sha256 {file['sha256']}"
        if not source["attributed"]:
            yield f"{name}: no attribution column; if its licence asks for attribution, keep it by other means"
        elif source["attributed"] < source["kept"]:
            yield f"{name}: only {source['attributed']:,} of {source['input']:,} rows have an attribution"
        if source["undecodable_lines"]:
            lines = ", ".join(f"{number:,}" for number in source["undecodable_lines"])
            yield f"{name}: lines that could not be decoded begin with {lines}"


def _drops(report: Mapping[str, Any]) -> Iterable[str]:
    for reason, dropped in report["dropped"].items():
        setting = f" (clean.{_SETTINGS[reason]})" if _SETTINGS.get(reason) else ""
        share = _share(dropped["rows"], report["input"])
        yield f"  {reason:<11}{dropped['rows']:>8,}  {share}  {MEANINGS[reason]}{setting}"
        where, *sides = dropped["samples"][0]
        sample = f"{where}  {' | '.join(sides)}"
        yield f"{'':23}{sample[:WIDEST]}{'…' if len(sample) > WIDEST else ''}"


def _script(report: Mapping[str, Any]) -> Iterable[str]:
    if total := sum(report["script"].values()):
        counts = ", ".join(f"{count:,} {kind}" for kind, count in report["script"].items())
        with_traditional = report["script"]["traditional"] + report["script"]["mixed"]
        wanted = report["settings"]["zh_script"]
        policy = wanted if wanted == "filter" else ", ".join(dict.fromkeys(report["zh_script"].values()))
        yield f"script      {counts}: {_share(with_traditional, total)} with Traditional characters; policy {policy}"


def _sets(report: Mapping[str, Any]) -> Iterable[str]:
    sets, split, leak = report["sets"], report["split"], report["leak"]
    yield "sets        " + ", ".join(f"{name} {count:,}" for name, count in sets.items())
    if split:
        yield (
            f"            drawn from {split['groups']:,} groups of pairs that share a sentence (largest "
            f"{split['largest_group']}); "
            f"{report['further_references']:,} rows more of the held-out groups are set aside as references"
        )
        shares = ", ".join(f"{100 * share:.1f} % {lang}" for lang, share in split["random_leak"].items())
        yield f"leak        a row-by-row split would have had {shares} of dev and test in train; this one has none"
    else:
        held_out = report["dropped"].get("held_out", {"rows": 0})["rows"]
        yield f"leak        {held_out:,} rows shared a sentence with dev or test and were left out; none is left"
        if leak["between"]:
            yield f"            {leak['between']:,} rows of the given test share a sentence with the given dev"
