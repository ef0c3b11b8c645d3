"""YAML as people mean it: `1e-4` is a number, and `no` and `on` are words, as in YAML 1.2.

Every key keeps its line, and a key that is written twice is a complaint, not a silent last word.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from ligertune.recipe.document import Document, KeyPath, Place, dotted

TAG = "tag:yaml.org,2002:"

# tag, what a plain word of that tag looks like, the characters it can start with; the first match counts
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
    yaml_implicit_resolvers: ClassVar[dict] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would take for something else than the string it is."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # items of a list stand to the right of its key


for _tag, _pattern, _first in PLAIN_WORDS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})\\Z"), _first)


def _number(text: str) -> float | int:
    value = float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    return int(value) if "." not in text and value.is_integer() and abs(value) < 2**53 else value  # 1e3 is whole


SCALARS = {
    TAG + "null": lambda text: None,
    TAG + "bool": lambda text: text.lower() == "true",
    TAG + "int": lambda text: int(text.replace("_", "")),
    TAG + "float": _number,
    TAG + "str": str,
}


class NotYaml(ValueError):
    """The text is not YAML; `line` counts from 1, 0 where it is not known."""

    def __init__(self, sentence: str, line: int = 0) -> None:
        super().__init__(sentence)
        self.line = line


def parse(text: str, document: Document, path: KeyPath = (), override: Place | None = None) -> Any:
    """The value that `text` holds at `path`; lines and doubled keys go to `document`. An override is one place."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _value(node, path, document, override)
    except yaml.YAMLError as error:
        raise _not_yaml(error, text) from None
    except RecursionError:
        raise NotYaml("it is nested too deeply, or has an anchor that contains itself.") from None


def dump(data: dict[str, Any]) -> str:
    """YAML that `parse` reads back as the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _value(node: yaml.Node, path: KeyPath, document: Document, override: Place | None) -> Any:
    if isinstance(node, yaml.CollectionNode) and node.tag not in (TAG + "map", TAG + "seq"):
        problem = f"a recipe has no {node.tag} like this"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, document, override)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _remember((*path, index), item, document, override)
        return [_value(item, (*path, index), document, override) for index, item in enumerate(node.value)]
    try:
        return SCALARS[node.tag](node.value)
    except (KeyError, ValueError):  # `!!python/...`, or `!!int ten`
        problem = f"a recipe has no {node.tag} like this"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _mapping(node: yaml.MappingNode, path: KeyPath, document: Document, override: Place | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be one word", key_node.start_mark)
        key, line = key_node.value, key_node.start_mark.line + 1
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


def _not_yaml(error: yaml.YAMLError, text: str) -> NotYaml:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return NotYaml(f"the character U+{error.character:04X} may not stand in YAML.", line)
    mark = error.problem_mark
    if "'\\t'" in error.problem:
        return NotYaml("a tab stands where YAML wants spaces.", mark.line + 1)
    problem = ", ".join(filter(None, (error.context, error.problem)))
    return NotYaml(f"not YAML at column {mark.column + 1}: {problem}.", mark.line + 1)
