"""What shells complete (`ligertune --install-completion`): keys of the recipe after `--set`."""

from __future__ import annotations


def recipe_keys(incomplete: str) -> list[str]:
    """`train.lear` -> `train.learning_rate=`."""
    from ligertune.recipe.describe import matching_keys

    return matching_keys(incomplete)
