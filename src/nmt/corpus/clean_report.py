"""The report of `clean` as a page for the terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from nmt.corpus.rules import RULES
from nmt.errors import counted

WIDEST = 100
"""Characters of a sample row that are shown."""

ALL = 99.95
"""BLEU that is printed as 100.0, and no reason for a warning."""

MEANINGS = {
    "undecodable": "bytes that are not text in clean.encoding",
    "columns": "not as many columns as its source has",
    **{rule.name: rule.means for rule in RULES},
    "duplicate": "an earlier pair again but for case, width and marks that change no meaning",
    "held_out": "shares a sentence with dev or test, itself or through other pairs",
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


def reasons(counts: Mapping[str, int]) -> str:
    """A sentence that says why rows were dropped, the commonest reason first; empty if none was."""
    dropped = sorted(((counts.get(f"dropped {reason}", 0), reason) for reason in MEANINGS), reverse=True)
    told = [f"{count:,} {reason} ({MEANINGS[reason]}{_setting(reason)})" for count, reason in dropped if count]
    return f"Dropped of {counted(counts['input'], 'row')}: {'; '.join(told)}." if told else ""


def _setting(reason: str) -> str:
    return f", clean.{_SETTINGS[reason]}" if _SETTINGS.get(reason) else ""


def given_warnings(report: Mapping[str, Any]) -> Iterable[str]:
    """A warning for each given set that a model can't match, since its lines are not as `clean` writes them.

    And one for a given test set that the given dev set, by which a model is chosen, has some of.
    """
    if report["given"] and report["leak"]["between"]:
        yield (
            f"clean.test: {report['leak']['between']:,} of its {counted(report['sets']['test'], 'row')} share a "
            "sentence with the given dev set, by which a model is chosen; scores of it will be too good."
        )
    for name, sides in report["reference_form"].items():
        for lang, found in sides.items():
            if found["bleu"] < ALL:
                share, script, helps = 100 * found["share"], "", ""
                if lang in report["zh_script"]:
                    wanted = report["settings"]["zh_script"]
                    policy = "simplified" if wanted == "filter" else report["zh_script"][lang]
                    script, helps = f"script: {policy}; ", ", or set clean.zh_script to their script"
                yield (
                    f"clean.{name}: {share:.1f} % of the lines of {lang} ({found['lines']:,}) are not in the form of "
                    f"the training text ({script}kind and width of marks); as references they let a perfect "
                    f"translation score BLEU {found['bleu']:.1f} at most. Give them in that form{helps}."
                )


def _share(count: int, total: int) -> str:
    return f"{100 * count / max(1, total):.2f} %"


def _sources(report: Mapping[str, Any]) -> Iterable[str]:
    for name, source in report["sources"].items():
        for file in source["files"]:
            yield f"{name}: {file['file']}, {counted(file['lines'], 'row')}, sha256 {file['sha256']}"
        if not source["attributed"]:
            yield f"{name}: no attribution column; if its licence asks for attribution, keep it by other means"
        elif source["attributed"] < source["kept"]:
            yield f"{name}: only {source['attributed']:,} of {counted(source['input'], 'row')} with an attribution"
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
    sets, split = report["sets"], report["split"]
    yield "sets        " + ", ".join(f"{name} {count:,}" for name, count in sets.items())
    if split:
        yield (
            f"            drawn from {split['groups']:,} groups of pairs that share a sentence (largest "
            f"{split['largest_group']}); "
            f"{report['further_references']:,} rows more of the held-out groups are further references"
        )
        shares = ", ".join(f"{100 * share:.1f} % {lang}" for lang, share in split["random_leak"].items())
        yield f"leak        a row-by-row split would have had {shares} of dev and test in train; this one has none"
    else:
        held_out = report["dropped"].get("held_out", {"rows": 0})["rows"]
        yield from (f"warning     {line}" for line in given_warnings(report))
        yield f"leak        {held_out:,} rows shared a sentence with dev or test and were left out; none is left"
