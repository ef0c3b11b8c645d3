"""Base class and value types of the recipe's sections: switches, paths relative to the recipe, shares."""

from __future__ import annotations

import glob
import os
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

SWITCHES = {"yes": True, "on": True, "no": False, "off": False}  # booleans in YAML 1.1, strings in 1.2


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


def convert_by(table: Mapping[str | bool | None, Any]) -> Callable[[Any], Any]:
    """Return a function that reads `yes` as true, and converts by a table; other values stay, to be validated."""

    def convert(value: Any) -> Any:
        # not numbers: 1 == True would find the entry of True
        if not (value is None or isinstance(value, str | bool)):
            return value
        value = SWITCHES.get(value, value)
        return table.get(value, value)

    return convert


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


Text = Annotated[str, StringConstraints(min_length=1)]
FileOrHub = Annotated[Text, AfterValidator(_resolve_path)]
Template = Annotated[Text, AfterValidator(_template_file)]
OutputPath = Annotated[Text, AfterValidator(os.path.expanduser)]
# as TrainingArguments reads report_to: one name is a list of it, and none is an empty list
ReadName = BeforeValidator(lambda value: (() if value == "none" else (value,)) if isinstance(value, str) else value)
ReadSwitch = BeforeValidator(convert_by({}))
Switch = Annotated[bool, ReadSwitch]
AutoSwitch = Annotated[Literal["auto"] | bool, ReadSwitch]
SwitchOrOffload = Annotated[Literal["offload", "offload_gate", "offload_both"] | bool, ReadSwitch]
SwitchOrNorms = Annotated[Literal["norms"] | bool, ReadSwitch]
When = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(convert_by({False: "no"}))]
Resume = Annotated[OutputPath, BeforeValidator(convert_by({True: "auto", False: "never", None: "never"}))]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
ShareBelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
NameList = Annotated[tuple[Text, ...], Field(strict=False)]
