"""Settings from YAML files and `--set`, all of their problems at once; and settings as text.

A file in `configs/` names only what differs from the defaults. `--set section.key=value` changes one setting. Nothing
is read beyond the file itself before all of its problems have been told.
"""

import ast
import difflib
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from nmt.config.schema import NOT_A_NAME, SECTIONS, Config, kinds, to_dict
from nmt.config.suggestions import MOST_EDITS, count_edits, nearest
from nmt.errors import MOST_TOLD, ConfigError

LARGEST_FILE = 1_000_000
"""Bytes; a settings file is a page, not a data set."""

LARGEST_NUMBER = 2**31 - 1
"""Of whole numbers; what reads the settings computes with them in floats and in 64 bits."""


# ── reading YAML ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Loader(yaml.SafeLoader):
    """YAML without its traps: 1e-4 is a number, `no` and 12:30 are strings, a key stands once.

    Aliases, which can make gigabytes of a page, are refused, and so are tags, since a value's kind is its setting's.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        alias = isinstance(event, yaml.AliasEvent)
        if alias or event.tag is not None:
            mark, what = event.start_mark, "aliases (*name)" if alias else "tags (!name)"
            raise ConfigError(f"{mark.name}, line {mark.line + 1}: {what} are not allowed in settings.")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"{node.start_mark.name}, line {line}: {key!r} is not a name.")
            if key in seen:
                raise ConfigError(f"{node.start_mark.name}: {key} is given twice, in lines {seen[key]} and {line}.")
            seen[key] = line
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag.endswith((":null", ":merge"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false|True|False)$"), list("tfTF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def _construct_int(loader: yaml.SafeLoader, node: Any) -> int:
    # Decimal always: YAML 1.1 would read 0755 as octal.
    return int(loader.construct_scalar(node).replace("_", ""))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _parse_yaml(text: str, name: str) -> Any:
    try:
        loader = _Loader(text)
        loader.name = name
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or "this is not YAML"
        raise ConfigError(f"{where}: {what}.") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{name}: this is not a settings file ({type(error).__name__}).") from error


def _convert(value: Any, kind: Any) -> Any:
    """`value` as a setting of type `kind`; raises ValueError with what was expected."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # `int | Literal["auto"]`
        number, words = arguments
        if isinstance(value, str) and value not in typing.get_args(words):
            near = difflib.get_close_matches(value, typing.get_args(words), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"expected a whole number, or {' or '.join(typing.get_args(words))}{hint}")
        return _convert(value, words if isinstance(value, str) else number)
    if origin is Literal:
        if value in arguments and isinstance(value, str):
            return value
        near = difflib.get_close_matches(str(value), arguments, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"expected one of {', '.join(arguments)}{hint}")
    if origin is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_convert(item, arguments[0]) for item in items)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError("expected names with values (name: value)")
        return {_convert(name, str): _convert(item, arguments[1]) for name, item in value.items()}
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError as error:
            raise ValueError("expected a smaller number") from error
        if number - number != 0:
            raise ValueError("expected a finite number")
        return number
    if kind is str and type(value) is str and NOT_A_NAME.search(value):
        raise ValueError("expected a text without line ends and control characters")
    if kind is int and type(value) is int and abs(value) > LARGEST_NUMBER:
        raise ValueError(f"expected a whole number of at most {LARGEST_NUMBER:,}")
    if type(value) is kind:
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text (quote it if need be)"}
    raise ValueError(f"expected {names[kind]}")


def _build(given: Mapping[str, Mapping[str, Any]], recipe: str, sources: Mapping[str, str]) -> Config:
    """The settings from raw values; raises ConfigError with every problem at once."""
    problems: list[str] = []
    built: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        hints, values = typing.get_type_hints(kind), {}
        for key, value in given.get(section, {}).items():
            source = sources.get(f"{section}.{key}")
            where = f"{section}.{key}" + (f" ({source})" if source else "")
            if key not in hints:
                near = nearest(key, section) if len(problems) < MOST_TOLD else ""
                problems.append(f"unknown setting {where}" + (f"; did you mean {near}?" if near else "."))
                continue
            try:
                values[key] = _convert(value, hints[key])
            except ValueError as error:
                text = f"{where} is {value!r}; {error}"
                problems.append(text if text.endswith("?") else f"{text}.")
        try:
            built[section] = kind(**values)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*problems)
    return Config(recipe=recipe, **built)


def _recipe_folders() -> list[Path]:
    """Where recipes lie: here, and those shipped with the package."""
    package = Path(__file__).parent.parent
    return [Path("configs"), package / "configs", package.parent.parent / "configs"]


def recipes() -> list[str]:
    """The files that `-c` finds by their name alone."""
    return sorted({path.name for folder in _recipe_folders() for path in folder.glob("*.yaml")})


def find_file(name: str) -> Path:
    """The settings file `name`: as given, then in `configs/`, then among the recipes shipped with the package."""
    try:
        for place in (Path(), *_recipe_folders()):
            for spelling in (name, f"{name}.yaml"):
                if (place / spelling).is_file():
                    return place / spelling
    except OSError as error:  # A name that is too long, a folder that is not ours.
        raise ConfigError(f"cannot read settings from {name}: {error.strerror}.") from error
    known = recipes()
    near = difflib.get_close_matches(Path(name).stem, [Path(file).stem for file in known], 1)
    raise ConfigError(
        f"no settings file {name}"
        + (f"; did you mean {near[0]}.yaml?" if near else ".")
        + f" Looked here, in configs/ and among the shipped recipes: {', '.join(known)}."
    )


def load(name: str | None, changes: Sequence[str] = ()) -> Config:
    """The settings of the file `name` (the defaults if None) with each `section.key=value` of `changes` put on top."""
    return load_with_origins(name, changes)[0]


def load_with_origins(name: str | None, changes: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """The settings, and for each `section.key` that is not a default the place that it came from."""
    given: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    recipe = "default"
    if name is not None:
        path = find_file(name)
        recipe = path.stem
        for section, values in _read_file(path).items():
            if section not in SECTIONS:
                if len(problems) < MOST_TOLD:
                    near = [name for name in SECTIONS if count_edits(section, name) <= MOST_EDITS]
                    meant = near[0] if near else nearest(section, "")
                hint = f"did you mean {meant}?" if meant else f"known are {', '.join(SECTIONS)}."
                problems.append(f"unknown section {section} ({path}); {hint}")
            elif not isinstance(values, Mapping | None):
                problems.append(f"{section} ({path}) is {values!r}; expected settings below it (key: value).")
            else:
                given[section] = dict(values or {})
                origins |= {f"{section}.{key}": str(path) for key in given[section]}
    problems += _put_on_top(given, changes)
    origins |= {change.partition("=")[0].strip(): "--set" for change in changes}
    try:
        config = _build(given, recipe, origins)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    if problems:
        raise ConfigError(*problems)
    return config, origins


def change(config: Config, changes: Sequence[str]) -> Config:
    """These settings with each `section.key=value` of `changes` put on top."""
    given = {section: to_dict(getattr(config, section)) for section in SECTIONS}
    problems = _put_on_top(given, changes)
    if problems:
        raise ConfigError(*problems)
    return _build(given, config.recipe, {})


def _put_on_top(given: dict[str, dict[str, Any]], changes: Sequence[str]) -> list[str]:
    """Change raw values by `section.key=value`; returns what is wrong with the changes themselves."""
    problems: list[str] = []
    for change in changes:
        key, equals, value = change.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot or section not in SECTIONS:
            meant = nearest(name or section, section if name else "") if len(problems) < MOST_TOLD else ""
            hint = f" Did you mean {meant}?" if meant else f" Sections are {', '.join(SECTIONS)}."
            problems.append(f"--set {change}: expected section.key=value.{hint}")
            continue
        try:
            given.setdefault(section, {})[name] = _parse_yaml(value, f"--set {key}")
        except ConfigError as error:
            problems.extend(error.problems)
    return problems


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    if len(raw) > LARGEST_FILE:
        raise ConfigError(f"{path} has {len(raw):,} bytes; a settings file has at most {LARGEST_FILE:,}.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}).") from error
    found = _parse_yaml(text, str(path))
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path} holds {type(found).__name__} at its top; expected sections (model: ...).")
    return found


# ── writing and showing ───────────────────────────────────────────────────────────────────────────────────────────────


def from_dict(values: Mapping[str, Any]) -> Config:
    """The Config that `to_dict` was given."""
    if not isinstance(values, Mapping) or not all(isinstance(values.get(name, {}), Mapping) for name in SECTIONS):
        raise ConfigError("these are no settings: expected sections with settings below them.")
    return _build({k: v for k, v in values.items() if k in SECTIONS}, str(values.get("recipe", "default")), {})


def sentences(kind: type[Any]) -> dict[str, str]:
    """What stands below each setting of a section, as one line, read from this file's own source."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        line.target.id: " ".join(text.value.value.split())
        for line, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def show(config: Config, origins: Mapping[str, str]) -> Iterator[str]:
    """The lines of a YAML file that has every setting, its sentence, and where a value that is no default came from."""
    for section, kind in SECTIONS.items():
        yield f"{section}:  # {inspect.getdoc(kind)}"
        told, values, kind_of = sentences(kind), to_dict(getattr(config, section)), kinds(kind)
        for key, value in values.items():
            text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
            source = origins.get(f"{section}.{key}")
            # Names the origin first, so that what a recipe changes is seen at a glance.
            kind_told = "" if kind_of[key] == "result" else f" ({kind_of[key]})"
            yield f"  # {told[key]}{kind_told}" + (f"  [{source}]" if source else "")
            yield f"  {key}: {text.removesuffix('...' + chr(10)).strip()}"
        yield ""


def differences(old: Any, new: Any) -> list[str]:
    """`section.key: old -> new` for each setting that two nested dicts have different."""

    def flat(value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, Mapping) and value:
            return {
                k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}" if path else key).items()
            }
        return {path: value}

    left, right = flat(old, ""), flat(new, "")
    absent = object()
    return [
        f"{key}: {left.get(key, '(absent)')} -> {right.get(key, '(absent)')}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key, absent) != right.get(key, absent)
    ]
