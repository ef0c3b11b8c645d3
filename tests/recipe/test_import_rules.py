"""The rules of keys.yaml name effects, facts and functions that exist: a misspelt one would convert nothing."""

from collections.abc import Iterator

from ligertune.recipe.importers.import_tables import KEYS, TOOLS
from ligertune.recipe.importers.key_rules import CONVERTERS, EFFECTS, WHOLE_EFFECTS


def rules(rows: list[dict]) -> Iterator[dict]:
    for row in rows:
        yield row
        yield from rules(row.get("then", []))


RULES = [rule for group in KEYS["rules"].values() for rule in rules(group)]


def conditions() -> Iterator[tuple[str, object]]:
    tables = [rule.get("when", {}) for rule in RULES] + list(KEYS["facts"].values())
    for table in tables + list(KEYS["default_conditions"].values()):
        for row in table if isinstance(table, list) else [table]:
            yield from row.items()


def test_every_effect_of_a_rule_exists_and_is_used():
    used = {effect for rule in RULES for effect in rule} - {"when"}
    assert used == {*EFFECTS, *WHOLE_EFFECTS}


def test_every_function_that_a_rule_calls_exists():
    called = [rule["call"] for rule in RULES if "call" in rule]
    assert len(called) == len(set(called)) and set(called) <= set(CONVERTERS)


def test_every_fact_and_tool_of_a_condition_exists_and_every_fact_is_used():
    used = {wanted for name, wanted in conditions() if name in ("is", "is not")}
    assert used == set(KEYS["facts"])
    tools = [word for name, wanted in conditions() if name == "tool" for word in str(wanted).split()]
    assert tools and set(tools) <= {tool.name for tool in TOOLS}
