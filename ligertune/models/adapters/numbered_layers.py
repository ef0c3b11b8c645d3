"""Layers by their number: `method.layers_to_transform` and `layers_pattern`, as PEFT reads them.

The number of a layer is the first one in its name: 2 in model.layers.2.mlp.experts.0.up_proj. `layers_pattern` names
the lists that count, such as `layers`; without it, any list does that has another module around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ligertune.errors import UserError

if TYPE_CHECKING:
    from ligertune.planning.options import MethodOptions


def is_numbered(name: str, spec: MethodOptions) -> bool:
    """Return whether `layers_to_transform` lets a layer or parameter have an adapter, by its full name.

    As in PEFT, a layer that `lora_target_modules` lists by its full name has one in any case.
    """
    wanted = spec.lora_target_modules
    if not spec.layers_to_transform or (not isinstance(wanted, str) and name in wanted):
        return True
    return layer_number(name, spec.layers_pattern) in spec.layers_to_transform


def layer_number(name: str, lists: Sequence[str]) -> int | None:
    """Return the number of the layer that a full name is in, or None.

    lists: names of the lists of layers that count, in the order in which PEFT looks for them; empty: any list.
    """
    if not lists:
        found = re.match(r".*?\.[^.]*\.(\d+)\.", name)
        return int(found[1]) if found else None
    for one in lists:  # a plain name: the recipe allows no expression
        found = re.match(rf"(?:^|.*?\.){one}\.(\d+)\.", name)
        if found:
            return int(found[1])
    return None


def numbered_names(wanted: Sequence[str], every: Sequence[str], spec: MethodOptions) -> list[str]:
    """Return those of the layers `wanted` that `layers_to_transform` lets have an adapter, by their full names.

    every: names of all modules. Raises UserError for a layer or a list of layers that the model does not have, and if
    no layer is left.
    """
    if not spec.layers_to_transform:
        return [*wanted]
    _check_lists(every, spec)
    numbers = _numbers_in(every, spec)
    beyond = [number for number in spec.layers_to_transform if number not in numbers]
    if beyond:
        raise UserError(
            f"method.layers_to_transform: the model has no layer {beyond[0]}.",
            hint=f"Its layers are {_shown(numbers)}.",
        )
    found = [name for name in wanted if is_numbered(name, spec)]
    if wanted and not found:
        raise UserError(
            f"method.layers_to_transform: {_shown(spec.layers_to_transform)}: nothing that method.lora_target_modules"
            " names is in there, so nothing would train.",
            hint=f"It is in {_shown(_numbers_in(wanted, spec))}.",
        )
    return found


def _check_lists(every: Sequence[str], spec: MethodOptions) -> None:
    """Raise UserError for a list of layers that the model does not have."""
    for wanted in spec.layers_pattern:
        if any(layer_number(f"{name}.", [wanted]) is not None for name in every):
            continue
        found = (re.match(r"(?:.*?\.)?([^.]+)\.\d+\.", f"{name}.") for name in every)
        known = sorted({match[1] for match in found if match})
        close = get_close_matches(wanted, known, n=1)
        raise UserError(
            f"method.layers_pattern: the model has no list of layers called {wanted}."
            + (f" Did you mean {close[0]}?" if close else ""),
            hint=f"Its lists of layers are {', '.join(known)}.",
        )


def _numbers_in(names: Iterable[str], spec: MethodOptions) -> set[int]:
    """Return the numbers of the layers that full names are in."""
    found = (layer_number(f"{name}.", spec.layers_pattern) for name in names)
    return {number for number in found if number is not None}


def _shown(numbers: Iterable[int]) -> str:
    """Return numbers as text: "0 to 3", or "0, 3 and 7"; "no layer with a number" if there are none."""
    ordered = sorted(set(numbers))
    if not ordered:
        return "no layer with a number"
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]} to {ordered[-1]}"
    *most, last = map(str, ordered)
    return f"{', '.join(most)} and {last}" if most else last
