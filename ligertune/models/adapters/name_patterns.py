"""Names of layers and parameters that a regular expression of a recipe or an adapter matches, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Sequence

import regex

from ligertune.errors import UserError
from ligertune.recipe.section import expression_fault

MATCH_SECONDS = 5  # for one expression; matching all names of a large model takes milliseconds


def matching_names(
    expression: str, names: Sequence[str], *, key: str, whole: bool = False, seconds: float = MATCH_SECONDS
) -> set[str]:
    """Return the names that an expression matches; with `whole`, from their beginning to their end.

    Raises UserError if it is no expression of `re`, which has no time limit, or takes longer than `seconds`.
    """
    fault = expression_fault(expression)
    if fault is not None:
        raise UserError(f"{key} {fault}")
    end = time.monotonic() + seconds
    try:
        compiled = regex.compile(expression)
        match = compiled.fullmatch if whole else compiled.search
        return {name for name in names if match(name, timeout=max(end - time.monotonic(), 1e-3))}
    except TimeoutError:
        raise UserError(
            f"{key}: matching {expression!r} with the model's names takes more than {seconds} s.",
            hint="Write it without repetitions inside a repeated group, such as (\\w+)+.",
        ) from None
    except (regex.error, RecursionError) as error:
        raise UserError(f"{key}: {expression!r} is not a regular expression: {error}.") from None
