"""The files that the README names exist, and its figures show its tables."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from command_line import ROOT
from script_modules import load_script

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("draw_tables")


def test_the_figures_scripts_and_recipes_that_it_names_exist():
    named = set(re.findall(r"(?:scripts|configs|tests)/[\w./-]*\w", README))
    assert len(named) > 20 and [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_it_is_short_enough_to_read():
    assert len(README.splitlines()) <= 200


def test_each_figure_has_a_table(script):
    tables = script.tables_of(README)
    drawn = {f"scripts/figures/{path.name}" for path in (ROOT / "scripts" / "figures").glob("table_*.png")}
    assert tables.keys() == drawn
    assert all(len(bars) >= 2 for rows in tables.values() for _, bars in rows)


TABLE = """
| other | table |
|---|---|
| x | 1,111, 1.0 |

Words.

| | batch | ligertune | liger-kernel |
|---|---|---|---|
| Llama | 4 | **32,899**, 20.9 GiB | 1,201 |
| | 16 | 41,936, **26.4**: `x` | |
| None | 4 | | |

![It](scripts/figures/table_it.png) and more
"""


def test_cells_become_bars(script):
    of_4 = ("Llama, batch 4", [("ligertune", 32_899.0, 20.9), ("liger-kernel", 1201.0, None)])
    of_16 = ("Llama, batch 16", [("ligertune", 41_936.0, 26.4)])
    assert script.tables_of(TABLE) == {"scripts/figures/table_it.png": [of_4, of_16]}


def test_a_figure_is_drawn(script, tmp_path):
    for path, rows in script.tables_of(TABLE).items():
        script.draw(rows, tmp_path / Path(path).name)
    assert (tmp_path / "table_it.png").read_bytes().startswith(b"\x89PNG")
