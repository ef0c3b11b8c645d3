"""Covering arrays for parametrized tests: every pair of values occurs, but not every combination."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(*axes: Sequence[Any]) -> list:
    """Return parameters in which every pair of values of two axes occurs. A pytest.param may hold several values."""
    rows = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return [_joined([axis[i] for axis, i in zip(axes, row, strict=True)]) for row in sorted(chosen)]


def _joined(values: list[Any]) -> Any:
    params = [value if hasattr(value, "values") and hasattr(value, "id") else pytest.param(value) for value in values]
    names = [param.id or ", ".join(map(str, param.values)) for param in params]
    return pytest.param(*(value for param in params for value in param.values), id="-".join(names))
