"""Column names: nested names, renames, and the names that published data sets have for prompts and answers.

A prompt name and an answer name together are read without `columns` if the data set has exactly one of each. With
several, or with a WEAK name, the data set is refused with the lines that choose. See recognise_shape.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ligertune.errors import UserError

PROMPT_NAMES = ("question", "query", "problem", "instruction", "prompt", "inputs", "input", "user", "request")
ANSWER_NAMES = (
    "answer", "response", "output", "completion", "solution", "answers", "targets", "target", "reply", "assistant",
)  # fmt: skip
WEAK_PROMPT_NAMES = (
    "dialogue", "article", "document", "text", "passage", "source", "message_1", "sql_prompt", "history", "context",
    "problem_statement", "inputs_pretokenized", "func_documentation_string", "description", "title",
)  # fmt: skip
WEAK_ANSWER_NAMES = (
    "summary", "highlights", "canonical_solution", "code", "generated_solution", "expected_answer", "final_answer",
    "message_2", "sql", "targets_pretokenized", "solutions", "generations", "completions", "responses",
    "func_code_string", "deepseek_solution", "abstract", "chosen",
)  # fmt: skip
# columns of a reasoning model's answers, in data sets that also have a short solution -> column of its reasoning
REASONED_ANSWERS = {
    "attempt": "thinking_trajectories.0",  # s1K
    "deepseek_attempt": "deepseek_thinking_trajectory",
    "gemini_attempt": "gemini_thinking_trajectory",
    "deepseek_solution": "deepseek_reasoning",  # OpenThoughts
    "generations.0": "",  # OpenR1
}
TURN_NAMES = ("conversation", "dialogue", "dialog", "chat", "turns", "data", "dialogs", "contents")
# columns that a format reads if the data set has them, by our name
OPTIONAL_NAMES: dict[str, tuple[str, ...]] = {
    "system": ("system_prompt", "system_message", "system_instruction", "systemInstruction.parts.0.text"),
    "tools": ("functions", "available_tools"),
    "input": ("context",),
    "reasoning": ("reasoning_content", "thinking", "cot", "complex_cot", "chain_of_thought", "thought"),
}
# columns by which other tools change what is trained
_WEIGHTY = re.compile(
    r"label|score|rating|reward|weight|kto_tag|winner|preference|chosen|rejected|reasoning|thinking|(^|_)cot\b"
    r"|^(system|tools|functions)|chat_template_kwargs|enable_thinking|^(helpfulness|correctness|context|history|passage)\Z",
    re.IGNORECASE,
)


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or None. `data.answers.0` is the first of the answers in the column `data`.

    A column that has the very name, dots included, comes first. A text on the way is parsed as JSON (cells of a csv).
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            return None
    return value


def renamed_row(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the row with `columns` applied, a dict of {our name: the data set's name}. Nested names are copied."""
    if not columns:
        return row
    kept = {column: value for column, value in row.items() if column not in columns.values()}
    renamed = {ours: value_of(row, name) for ours, name in columns.items() if name in row or "." in name}
    return kept | renamed


def check_columns_exist(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Raise UserError for a rename of a column that none of these rows has."""
    found = {column for row in rows for column in row}
    for name in columns.values() if found else ():
        if name in found or any(value_of(row, name) is not None for row in rows):
            continue
        step = _first_list(name, rows)
        raise UserError(
            f"{path} has no column `{name}` (data.datasets[].columns); it has {', '.join(sorted(found))}.",
            hint=f"`{step}` is a list: `{step}.0` is its first item." if step else "",
        )


def _first_list(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the beginning of a nested name that is a list in these rows, if the name goes on without a number."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        start = ".".join(parts[:length])
        if not parts[length].isdecimal() and any(isinstance(value_of(row, start), list) for row in rows):
            return start
    return ""


def is_weighty(column: str) -> bool:
    """Return whether other tools change what is trained by a column of this name."""
    return _WEIGHTY.search(column) is not None or column.lower() in OPTIONAL_NAMES["system"]


def columns_line(columns: Mapping[str, str]) -> str:
    """Return the line of a recipe that renames columns."""
    return "data.datasets[].columns: {" + ", ".join(f"{ours}: {name}" for ours, name in columns.items()) + "}"
