"""YAML 1.2 reading and writing: `1e-4` is a number, `no` and `on` are strings.

The parser records the line of every key, and reports a key that is given twice. A recipe has at most MAX_NODES keys
and values, those that aliases repeat included: a few lines of aliases of aliases would fill the memory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import yaml

from ligertune.errors import printable
from ligertune.recipe.document import Document, KeyPath, Place, dotted

TAG = "tag:yaml.org,2002:"
MAX_NODES = 10_000
_MAX_INTEGER = 10**15  # below 2**53, so that a float holds every integer of a recipe exactly

# (tag, pattern of an unquoted scalar with this tag, its possible first characters); the first match counts.
# PyYAML's own patterns are those of YAML 1.1, where `no` is false, 1:30 is 90 and 1e-4 is a string.
PLAIN_WORDS = (
    (TAG + "null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (TAG + "bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (TAG + "int", r"[-+]?[0-9][0-9_]{0,18}", list("-+0123456789")),
    (
        TAG + "float",
        r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    n_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.n_nodes += 1
        _check_size(self.n_nodes)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quote strings that YAML 1.1 or 1.2 would read as another type."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # indent list items below their key


# A class without this table copies its base's, whose patterns are those of YAML 1.1.
_Loader.yaml_implicit_resolvers = {}

for _tag, _pattern, _first in PLAIN_WORDS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})\\Z"), _first)


def _number(text: str) -> float | int:
    value = float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    is_whole = "." not in text and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value  # 1e3 is an integer, if exact


SCALARS: dict[str, Callable[[str], Any]] = {
    TAG + "null": lambda text: None,
    TAG + "bool": lambda text: text.lower() == "true",
    TAG + "int": lambda text: int(text.replace("_", "")),
    TAG + "float": _number,
    TAG + "str": str,
}


class NotYaml(ValueError):
    """The text is not valid YAML. line: counts from 1; 0 if unknown."""

    def __init__(self, sentence: str, line: int = 0) -> None:
        super().__init__(sentence)
        self.line = line


def parse(text: str, document: Document, path: KeyPath = (), override: Place | None = None) -> Any:
    """Return the value of `text`; record the lines of its keys in `document`, below `path`.

    override: the place of a `--set` option, which counts as the place of every key in `text`.
    Raises NotYaml.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _value(node, path, document, override)
    except (yaml.MarkedYAMLError, yaml.reader.ReaderError) as error:  # composing raises no other YAMLError
        raise _not_yaml(error, text) from None
    except RecursionError:  # composing and converting are recursive
        raise NotYaml("it is nested too deeply, or an anchor contains itself.") from None


def dump(data: dict[str, Any]) -> str:
    """Write YAML that `parse` reads back as the same data, and that a terminal can show."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    if printable(text) == text:
        return text
    # PyYAML then writes all that is not ASCII as "\u202e", in double quotes
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)


def _check_size(n_nodes: int) -> None:
    if n_nodes > MAX_NODES:
        raise NotYaml(f"it holds more than {MAX_NODES:,} keys and values, counting what its aliases repeat.")


def _value(node: yaml.Node, path: KeyPath, document: Document, override: Place | None) -> Any:
    document.n_values += 1
    _check_size(document.n_values)
    if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
        return _mapping(node, path, document, override)
    if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
        for index, item in enumerate(node.value):
            _remember((*path, index), item, document, override)
        return [_value(item, (*path, index), document, override) for index, item in enumerate(node.value)]
    problem = f"a recipe cannot hold {node.tag}"  # `!!python/...`, `!!set`
    if isinstance(node, yaml.ScalarNode) and node.tag in SCALARS:
        with contextlib.suppress(ValueError):  # `!!int ten`
            value = SCALARS[node.tag](node.value)
            problem = _impossible(value)
            if not problem:
                return value
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _impossible(value: Any) -> str:
    """Return why no key can have this scalar, or an empty string."""
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        return "half of a surrogate pair, which is no character"  # "\ud800" in double quotes
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return f"{value} is too large: integers have at most 15 digits"
    return ""


def _mapping(node: yaml.MappingNode, path: KeyPath, document: Document, override: Place | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a single scalar", key_node.start_mark)
        key = key_node.value
        line = key_node.start_mark.line + 1
        here = (*path, key)
        if key in values:
            both = "" if override else f", at lines {lines[key]} and {line}"
            document.complain_at(override or document.place(here), f"{dotted(here)} is given twice{both}.")
            continue
        _remember(here, key_node, document, override)
        lines[key] = line
        values[key] = _value(value_node, here, document, override)
    return values


def _remember(path: KeyPath, node: yaml.Node, document: Document, override: Place | None) -> None:
    if override is None:
        document.places[path] = Place("", node.start_mark.line + 1, document.file)


def _not_yaml(error: yaml.MarkedYAMLError | yaml.reader.ReaderError, text: str) -> NotYaml:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return NotYaml(f"the character U+{error.character:04X} is not allowed in YAML.", line)
    mark = error.problem_mark
    assert mark is not None  # every error of a parser or of `_value` has its place
    if "'\\t'" in (error.problem or ""):
        return NotYaml("YAML does not allow a tab here. Use spaces.", mark.line + 1)
    problem = ", ".join(filter(None, (error.context, error.problem)))[:200]
    return NotYaml(f"not YAML at column {mark.column + 1}: {problem}.", mark.line + 1)
