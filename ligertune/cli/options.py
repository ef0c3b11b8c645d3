"""Options that several commands share: the recipe's path, `--set`, `--json`, and completion of recipe keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
