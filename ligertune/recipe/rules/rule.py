"""Rule: a combination of values that a recipe must not have, and its message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from ligertune.recipe.section import Section

ADAPTER = "method.type: lora|qlora"
# the end of messages about two keys that exclude each other
ONE_OUT = "Leave one of them out."
CHANGES_WEIGHTS = "olora|pissa|pissa_niter_4|pissa_niter_16"  # values of method.init_lora_weights
TILES = "train.tiled_mlp: not false|auto"
# messages of `each` that general rules share with those of features, so that one key always has one explanation
INIT_CHANGES_WEIGHTS = "{0}: {v[0]} subtracts the initial adapter from the weights, and {why}"
NO_CUDA_GRAPHS = f"{{0}} replays forward and backward as one graph, and {{why}}. {ONE_OUT}"
NO_TILES = f"{{0}} runs parts of a layer on a few tokens at a time, and {{why}}. {ONE_OUT}"
# messages for tasks that exclude a key
NO_NOISE = f"{{0}} makes outputs random, and {{1}} is {{v[1]}}, which compares them with others. {ONE_OUT}"
NO_NEW_TOKENS = (
    "{0} changes the vocabulary, and {1} is {v[1]}, which needs that of another model. "
    "Train the tokens with task: sft first."
)
NEW_TOKENS = ("model.tokenizer.add_tokens", "model.tokenizer.add_special_tokens")
LITERALS = {"true": True, "false": False, "null": None, "1": 1, "2": 2}


def _condition(text: str) -> tuple[str, Callable[[Any], bool]]:
    """Read one condition: a recipe key, and the values of it that a rule is about.

    "key": it is not false, 0, null or empty.  "no key": it is.  "key: a|b": it has one of these values.
    "key: not a|b": it has another value.  "key: any": the rule's message only mentions it.
    """
    key, _, values = text.partition(": ")
    if not values:
        return key.removeprefix("no "), (lambda value: not value) if key.startswith("no ") else bool
    named = [LITERALS.get(word, word) for word in values.removeprefix("not ").split("|")]
    if values == "any":
        return key, lambda value: True
    return key, lambda value: (value in named) != values.startswith("not ")


@dataclass(frozen=True)
class Rule:
    """A combination of values that a recipe must not have.

    when: conditions, separated by commas; the rule is broken if all of them and `also` hold.
    message: names the keys as {0}, {1}, ... in the order of `when`, and their values as {v[0]}, {v[1]}, ...
    """

    when: str
    message: str
    also: Callable[[Any], bool] = lambda recipe: True

    @cached_property
    def conditions(self) -> list[tuple[str, Callable[[Any], bool]]]:
        return [_condition(text) for text in self.when.split(", ")]

    def is_broken(self, recipe: Section) -> bool:
        return all(holds(attrgetter(key)(recipe)) for key, holds in self.conditions) and self.also(recipe)


def each(message: str, lead: str, *rows: tuple[str, str]) -> list[Rule]:
    """Return one rule per (condition, reason): `lead` excludes the condition. The message contains {why}."""
    return [Rule(f"{lead}, {condition}", message.replace("{why}", why)) for condition, why in rows]
