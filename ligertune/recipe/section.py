"""Base class and value types of the recipe's sections: switches, paths relative to the recipe, shares, expressions."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

EXACT_MATCH = "exact_match"  # a metric of answers
TASK_FILES = (".yaml", ".yml")  # of lm-evaluation-harness
UNUSABLE = "unusable"  # pydantic's type of errors whose message is the end of a complaint: "holds a NUL character"
MIN_TILE = 64  # tokens; smaller tiles leave a GPU idle
_MAX_NAME = 255  # bytes that Linux allows for the name of a file
_MAX_PATH = 4095  # bytes that Linux allows for a path
_MAX_EXPRESSION = 1000  # characters
_MAX_REPEATS = 1000  # product of all counts, because nested ones multiply: (a{1000}){1000}
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "source", "name", "spans")  # of chat templates
ValueTable = Mapping[str | bool | None, Any]  # value of another tool, or of YAML 1.1 -> value of a key
SWITCHES: ValueTable = {"yes": True, "on": True, "no": False, "off": False}  # booleans in YAML 1.1, strings in 1.2


class Section(BaseModel):
    """A frozen group of keys; the string below a key is its description.

    Unknown keys are errors, and types are not converted: "3" is not a number.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_section_means_defaults(cls, given: Any) -> Any:
        return {} if given is None else given


def convert_by(table: ValueTable) -> Callable[[Any], Any]:
    """Return a function that reads `yes` as true, and converts by a table; other values stay, to be validated."""

    def convert(value: Any) -> Any:
        # not numbers: 1 == True would find the entry of True
        if not (value is None or isinstance(value, str | bool)):
            return value
        value = SWITCHES.get(value, value)
        return table.get(value, value)

    return convert


def unusable(sentence: str) -> PydanticCustomError:
    """Return the error whose message is the end of a complaint about a key."""
    return PydanticCustomError(UNUSABLE, "{sentence}", {"sentence": sentence})


def path_fault(value: str) -> str | None:
    """Return the end of a sentence about a path that no file can have."""
    if "\0" in value:
        return "holds a NUL character, which no path can."
    encoded = value.encode("utf-8", "surrogatepass")
    longest = max((len(name) for name in encoded.split(os.fsencode(os.sep))), default=0)
    if longest > _MAX_NAME or len(encoded) > _MAX_PATH:
        return f"is too long: a name in a path has at most {_MAX_NAME} bytes, and a path {_MAX_PATH}."
    return None


def _possible_path(value: str) -> str:
    """Return the path if a file can have it: the system's own error for it would come late, without the key."""
    fault = path_fault(value)
    if fault is not None:
        raise unusable(fault)
    return value


def expression_fault(value: str) -> str | None:
    """Return the end of a sentence about an expression that is none, or that fills memory: `(a{1000}){1000}`."""
    repeats = math.prod(max(1, int(most or least or 1)) for least, most in re.findall(r"\{(\d*),?(\d*)\}", value))
    if len(value) > _MAX_EXPRESSION or repeats > _MAX_REPEATS:
        return (
            f"is too long: an expression has at most {_MAX_EXPRESSION:,} characters, "
            f"and counts at most {_MAX_REPEATS:,} repeats."
        )
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is {value!r}, which is not a regular expression: {error}."
    return None


def _possible_expression(value: str) -> str:
    fault = expression_fault(value)
    if fault is not None:
        raise unusable(fault)
    return value


def _plain_name(value: str) -> str:
    """Return a name of a module if it is no expression: PEFT matches it with `re`, which has no time limit."""
    if not re.fullmatch(r"\w+(\.\w+)*", value):
        raise unusable(f"is {value!r}, and must be a name, such as layers or h.")
    return value


def _resolve_path(value: str, info: ValidationInfo) -> str:
    """Return the absolute path of `value` if it exists in the recipe's folder or the current one, else `value`."""
    value = os.path.expanduser(value)
    folders = [Path.cwd()] if info.context is None else [info.context, Path.cwd()]
    for folder in folders:
        path = os.path.abspath(folder / value)  # not resolve(): a link's target may have another file extension
        if os.path.exists(path):
            return path
        if glob.has_magic(value):
            pattern = os.path.join(glob.escape(os.path.abspath(folder)), value)
            if glob.glob(pattern, recursive=True):
                return pattern
    return value


def _template_file(value: str, info: ValidationInfo) -> str:
    """Return the absolute path of a template file, else the name of a built-in template."""
    # only a file: a folder may have the name of a built-in template
    path = _resolve_path(value, info)
    return path if os.path.isfile(path) else value


def _metric_name(value: str, info: ValidationInfo) -> str:
    """Return exact_match, or file.py:function with the absolute path of the file."""
    return value if value == EXACT_MATCH else _file_function(value, info, other=f"{EXACT_MATCH}, or ")


def _file_function(value: str, info: ValidationInfo, *, other: str = "") -> str:
    """Return file.py:function with the absolute path of the file. other: what else the key may hold."""
    file, _, function = value.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise unusable(f"is {value!r}: write {other}file.py:function.")
    return f"{_resolve_path(file, info)}:{function}"


def _task_name(value: str, info: ValidationInfo) -> str:
    """Return the name of a task, or the absolute path of its YAML file."""
    return _resolve_path(value, info) if value.endswith(TASK_FILES) else value


def _template_variables(values: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat template, unless one of them is set by ligertune itself."""
    for name in values:
        if name in RESERVED_VARIABLES:
            raise unusable(f"sets {name}, which ligertune sets itself: remove it.")
    return values


Text = Annotated[str, StringConstraints(min_length=1)]
PathText = Annotated[Text, AfterValidator(_possible_path)]
FileOrHub = Annotated[PathText, AfterValidator(_resolve_path)]
Template = Annotated[PathText, AfterValidator(_template_file)]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(_template_variables)]
OutputPath = Annotated[PathText, AfterValidator(os.path.expanduser)]
# as TrainingArguments reads report_to: one name is a list of it, and none is an empty list
ReadName = BeforeValidator(lambda value: (() if value == "none" else (value,)) if isinstance(value, str) else value)
ReadSwitch = BeforeValidator(convert_by({}))
Switch = Annotated[bool, ReadSwitch]
AutoSwitch = Annotated[Literal["auto"] | bool, ReadSwitch]
AutoSwitchOrOffload = Annotated[Literal["auto", "offload", "offload_gate", "offload_both"] | bool, ReadSwitch]
TiledSwitch = Annotated[Literal["auto"] | bool | Annotated[int, Field(ge=MIN_TILE)], ReadSwitch]
SwitchOrLayers = Annotated[Literal["auto", "norms", "mlps"] | bool, ReadSwitch]
When = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(convert_by({False: "no"}))]
Resume = Annotated[OutputPath, BeforeValidator(convert_by({True: "auto", False: "never", None: "never"}))]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
# as TrainingArguments reads save_steps: a number below 1 is a share of all steps
StepsOrShare = Annotated[int, Field(gt=0)] | Annotated[float, Field(gt=0.0, lt=1.0)]
ShareBelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
# names of other data sets and tools
RoleName = Annotated[
    Literal["system", "user", "assistant", "tool"],
    BeforeValidator(convert_by({"human": "user", "gpt": "assistant", "model": "assistant"})),
]
RoleList = Annotated[tuple[RoleName, ...], Field(strict=False, min_length=1)]
NameList = Annotated[tuple[Text, ...], Field(strict=False)]
MetricName = Annotated[PathText, AfterValidator(_metric_name)]
FileFunction = Annotated[PathText, AfterValidator(_file_function)]
TaskNames = Annotated[tuple[Annotated[PathText, AfterValidator(_task_name)], ...], Field(strict=False)]
# as PEFT reads layers_to_transform and layers_pattern: one value is a list of it
OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, int | str) else value)
LayerNumbers = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**12)], ...], Field(strict=False), OneOrMore]
ModuleNames = Annotated[tuple[Annotated[Text, AfterValidator(_plain_name)], ...], Field(strict=False), OneOrMore]
Expression = Annotated[Text, AfterValidator(_possible_expression)]
ExpressionList = Annotated[tuple[Expression, ...], Field(strict=False)]
