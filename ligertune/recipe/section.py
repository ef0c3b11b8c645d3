"""What the recipe's sections are made of: the frozen base, words for switches, and paths beside the recipe."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
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

SWITCHES = {"yes": True, "on": True, "no": False, "off": False}  # booleans of YAML 1.1; ours reads them as words


class Section(BaseModel):
    """A frozen group of keys; unknown keys are forbidden and nothing is converted ("3" is no number)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _nothing_written_means_defaults(cls, given: Any) -> Any:
        return {} if given is None else given


def _words(meanings: Mapping[str | bool | None, Any]) -> BeforeValidator:
    """Other spellings of a value, by what they mean."""

    def read(value: Any) -> Any:
        known = value is None or isinstance(value, str | bool)  # never 0 or 1, which equal False and True
        return meanings.get(value, value) if known else value

    return BeforeValidator(read)


def _beside_the_recipe(value: str, info: ValidationInfo) -> str:
    """The absolute path where `value` names something that exists beside the recipe, or in the current folder."""
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
    """As above for a file; the name of a built-in template may also be the name of a folder."""
    path = _beside_the_recipe(value, info)
    return path if os.path.isfile(path) else value


Text = Annotated[str, StringConstraints(min_length=1)]
FileOrHub = Annotated[Text, AfterValidator(_beside_the_recipe)]
Template = Annotated[Text, AfterValidator(_template_file)]
OutputPath = Annotated[Text, AfterValidator(os.path.expanduser)]
Switch = Annotated[bool, _words(SWITCHES)]
AutoSwitch = Annotated[Literal["auto"] | bool, _words(SWITCHES)]
SwitchOrOffload = Annotated[Literal["offload", "offload_gate", "offload_both"] | bool, _words(SWITCHES)]
SwitchOrNorms = Annotated[Literal["norms"] | bool, _words(SWITCHES)]
When = Annotated[Literal["no", "steps", "epoch"], _words({False: "no", "off": "no"})]
Resume = Annotated[
    OutputPath,
    _words({True: "auto", "yes": "auto", "on": "auto", False: "never", "no": "never", "off": "never", None: "never"}),
]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
ShareBelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
NameList = Annotated[tuple[Text, ...], Field(strict=False)]
