"""Rows of the tables of training benchmarks: what is trained, by which sides, and what a page says about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LENGTH = 512  # tokens of a row in most tables; --length scales batches from it


@dataclass(frozen=True)
class Case:
    """One workload that all of its sides train.

    model: of the corpus' model_configs, or of tables/moe_models.py. data: a kind of `inputs.DATA`.
    batches: rows of a micro-batch, each a measurement. step_rows: rows of an optimizer step, where it accumulates.
    settings: recipe keys. sides: instead of those of the table. teacher: configuration of a teacher.
    published: tokens/s that somebody else publishes for it, on one H100.
    """

    name: str
    about: str
    model: str
    data: str
    batches: tuple[int, ...]
    length: int = LENGTH
    layers: int | None = None
    step_rows: int | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    sides: tuple[str, ...] = ()
    teacher: str | None = None
    published: float | None = None


@dataclass(frozen=True)
class Table:
    """The cases of one page.

    page: its file name without device and month. sides: default of --sides.
    by_step: the rate is the median of single steps, because kernels are compiled in some steps; else the mean.
    before: bfloat16 steps that come first, whose weights all sides fine-tune.
    extra: further values of the report's throughput, as columns. curves: the chart shows losses.
    written: the random weights are in a folder, which all sides load.
    profiled: steps after the measured ones that torch.profiler traces; host_time.py adds what it reads from them.
    note: source of `published`. settings: recipe keys of all cases.
    """

    page: str
    title: str
    intro: str
    caveats: tuple[str, ...]
    cases: tuple[Case, ...]
    sides: tuple[str, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    steps: int = 20
    small_steps: int = 4
    warmup: int = 5
    by_step: bool = False
    before: int = 0
    curves: bool = False
    written: bool = False
    profiled: int = 0
    extra: tuple[tuple[str, str, str], ...] = ()
    published_by: str = ""
