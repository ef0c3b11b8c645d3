"""Options that several commands share, and commands and options that features add.

A feature registers its own as PART in its module `command`. `ligertune --help` imports that module, so it imports
torch, transformers and pydantic inside its functions only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligertune.errors import UserError
from ligertune.recipe.feature import LAST, feature_names

if TYPE_CHECKING:
    from ligertune.decode.generate import GeneratedText


def complete_recipe_key(incomplete: str) -> list[str]:
    """Complete a recipe key for the shell: `train.lear` -> `train.learning_rate=`."""
    # imported here: `--help` must not wait for pydantic
    from ligertune.recipe.describe import matching_keys

    return matching_keys(incomplete)


RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML file).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a recipe key, such as train.learning_rate=1e-4. May be repeated.",
        autocompletion=complete_recipe_key,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON report to stdout, and everything else to stderr.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model. Read it first.")
]
ExportCheckpoint = Annotated[
    str | None, typer.Option("--checkpoint", help="Export a checkpoint: step-200 or newest, for example.")
]
ExportDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Write weights as bfloat16, float16 or float32, dequantised. Default: as they were trained.",
        show_default=False,
    ),
]

# ---- what features add


@dataclass(frozen=True)
class GenerateRequest:
    """The arguments of `ligertune generate`. prompts_file, images: of --prompts and --image."""

    model: str
    prompts: list[str]
    system: str | None
    raw: bool
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    trust_remote_code: bool
    prompts_file: Path | None
    images: tuple[str, ...]


@dataclass(frozen=True)
class CommandPart:
    """What a feature adds to the command line.

    train: a command that runs a recipe, as a function for typer. order: its place after `ligertune train`.
    decode: returns the answers to a GenerateRequest, or None if its options are not given. Its keyword-only parameters
    are these options of `ligertune generate`.
    check: compares files that the feature wrote, for `ligertune export FOLDER --check`: (folder, prompt or None,
    trust_remote_code). It returns a row for each, or None for other folders, and imports torch for its own only.
    """

    train: Callable[..., None]
    decode: Callable[..., Iterable[GeneratedText] | None] | None = None
    check: Callable[[Path, str | None, bool], list[dict[str, Any]] | None] | None = None
    order: int = LAST


@cache
def command_parts() -> tuple[CommandPart, ...]:
    """Return the parts of all features that add to the command line."""
    modules = [f"{name}.command" for name in feature_names()]
    parts = [importlib.import_module(module).PART for module in modules if find_spec(module) is not None]
    return tuple(sorted(parts, key=lambda part: part.order))


def with_decoders(generate: Callable[..., None]) -> Callable[..., None]:
    """Give `generate` the options of the features' decoders, in front of its option --seed.

    `generate` receives them as keyword arguments; typer reads them from the signature.
    """
    own = inspect.signature(generate, eval_str=True)
    parameters = []
    for parameter in own.parameters.values():
        if parameter.name == "seed":
            parameters += [option for decode in _decoders() for option in _options_of(decode)]
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
    # `inspect` reads the attribute, and type checkers do not know it
    generate.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return generate


def answers_of_decoder(request: GenerateRequest, options: dict[str, Any]) -> Iterable[GeneratedText] | None:
    """Return the answers of the decoder that the options choose; None if they choose none.

    The first option of a decoder chooses it. Raises UserError for two of them, and for others of a decoder without it.
    """
    chosen: dict[str, Callable[[], Iterable[GeneratedText] | None]] = {}
    for decode in _decoders():
        own = _options_of(decode)
        given = {option.name: options.get(option.name, option.default) for option in own}
        switch = _flag(own[0].name)
        changed = [_flag(option.name) for option in own if given[option.name] != option.default]
        if switch in changed:
            chosen[switch] = partial(decode, request, **given)
        elif changed:
            message = f"{changed[0]} is an option of {switch}, which is not given."
            raise UserError(message, hint=f"Add {switch}, or leave {changed[0]} out.")
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} decode in different ways.", hint="Give one of them.")
    return next(iter(chosen.values()))() if chosen else None


def check_of_feature(folder: Path, prompt: str | None, trust_remote_code: bool) -> list[dict[str, Any]] | None:
    """Return the rows of the first feature that wrote a folder; None if none did. Raises UserError."""
    for part in command_parts():
        rows = None if part.check is None else part.check(folder, prompt, trust_remote_code)
        if rows is not None:
            return rows
    return None


def _flag(name: str) -> str:
    """Return an option as it is written in a command line."""
    return "--" + name.replace("_", "-")


def _decoders() -> Iterator[Callable[..., Iterable[GeneratedText] | None]]:
    return (part.decode for part in command_parts() if part.decode is not None)


def _options_of(decode: Callable[..., Iterable[GeneratedText] | None]) -> list[inspect.Parameter]:
    parameters = inspect.signature(decode, eval_str=True).parameters.values()
    options = (parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
    return [option.replace(kind=option.POSITIONAL_OR_KEYWORD) for option in options]
