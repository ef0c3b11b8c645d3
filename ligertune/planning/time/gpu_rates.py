"""Rates of GPUs, measured by `scripts/bench gpu_rates`: what products, kernels and the optimizer reach.

A GPU that has no file, from NVIDIA or AMD, gets the reference GPU's rates, scaled by the data-sheet rates of both. Such
a prediction is a guess, and the plan says so.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ligertune.hardware import Machine, peak_of

REFERENCE = "h200"
NAMES = ("h200", "h100")  # words of a device's name that have a file


RateTable = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class GpuRates:
    """What one GPU reaches. measured: on this kind of GPU; else the reference's shares of its data-sheet rates."""

    copy: float  # bytes/s, read and written
    matmul: float  # FLOP/s of a large square product in bfloat16
    linear: RateTable  # (E, tokens, FLOP/s) of a layer E -> 4 E, forward and backward
    experts: RateTable  # (square root of E F, tokens of an expert, FLOP/s) of a mixture, forward and backward
    shares: Mapping[str, tuple[tuple[tuple[int, ...], float], ...]]  # op -> (sizes, share of the least time)
    optimizer: float  # bytes/s of a clipped AdamW step
    device: str
    measured: bool = True

    def attention_share(self, length: float, head_dim: float) -> float:
        """Return attention's share of the least time for documents of a length, at the nearest head dimension."""
        rows = self.shares["document_attention"]
        nearest = min({sizes[2] for sizes, _ in rows}, key=lambda size: abs(math.log(size / head_dim)))
        found = sorted((sizes[1], share) for sizes, share in rows if sizes[2] == nearest)
        return _between([place for place, _ in found], [share for _, share in found], length)

    def share(self, op: str, size: float, dimension: int) -> float:
        """Return an op's share of the least time, between the measured sizes of one dimension."""
        rows = sorted((sizes[dimension], share) for sizes, share in self.shares[op])
        return _between([place for place, _ in rows], [share for _, share in rows], size)


def rate_at(table: RateTable, width: float, tokens: float) -> float:
    """Return FLOP/s of products of a width and a number of tokens, between the measured ones by their logarithms."""
    widths = sorted({size for size, _, _ in table})
    rates = []
    for one in widths:
        rows = sorted((count, rate) for size, count, rate in table if size == one)
        rates.append(_between([count for count, _ in rows], [rate for _, rate in rows], tokens))
    return _between(widths, rates, width)


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Interpolate by the logarithms of the places; outside of them the nearest value."""
    if at <= places[0] or len(places) == 1:
        return values[0]
    if at >= places[-1]:
        return values[-1]
    right = bisect.bisect_right(places, at)
    low = places[right - 1]
    part = math.log(at / low) / math.log(places[right] / low)
    return values[right - 1] + part * (values[right] - values[right - 1])


def file_name(device: str) -> str:
    """Return the name of a device's file."""
    words = re.split(r"[^a-z0-9]+", device.lower())
    return f"{next((name for name in NAMES if name in words), '-'.join(filter(None, words)))}.json"


@cache
def _read(name: str) -> GpuRates | None:
    path = files("ligertune.planning.time") / "rates" / name
    if not path.is_file():
        return None
    return rates_in(json.loads(path.read_text(encoding="utf-8")))


def rates_in(found: Mapping[str, Any]) -> GpuRates:
    """Return the rates in a file's values."""
    shares: dict[str, list[tuple[tuple[int, ...], float]]] = {}
    for op, sizes, share in found["shares"]:
        shares.setdefault(op, []).append((tuple(sizes), share))
    return GpuRates(
        copy=found["copy"],
        matmul=found["matmul"],
        linear=_table(found["linear"]),
        experts=_table(found["experts"]),
        shares={op: tuple(rows) for op, rows in shares.items()},
        optimizer=found["optimizer"],
        device=found["device"],
    )


def _table(rows: Sequence[Sequence[float]]) -> RateTable:
    return tuple((row[0], row[1], row[2]) for row in rows)


def rates_of(machine: Machine) -> GpuRates | None:
    """Return the rates of a machine's GPU; None for a CPU, and for a GPU whose data-sheet rates are not known."""
    if machine.device != "cuda":
        return None
    own = _read(file_name(machine.name))
    if own is not None:
        return own
    reference = _read(f"{REFERENCE}.json")
    if reference is None or not machine.peak_flops or not machine.peak_bandwidth:
        return None
    peak = peak_of(reference.device)
    assert peak is not None  # the reference is in the table
    flops = machine.peak_flops / peak.bf16
    traffic = machine.peak_bandwidth / peak.bandwidth
    return GpuRates(
        copy=reference.copy * traffic,
        matmul=reference.matmul * flops,
        linear=_scaled(reference.linear, flops),
        experts=_scaled(reference.experts, flops),
        shares=reference.shares,
        optimizer=reference.optimizer * traffic,
        device=reference.device,
        measured=False,
    )


def _scaled(table: RateTable, factor: float) -> RateTable:
    return tuple((width, tokens, rate * factor) for width, tokens, rate in table)
