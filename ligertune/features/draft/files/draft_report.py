"""DraftReport: expected acceptance of a trained head on held-out data, and what it was trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ligertune.errors import plural
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.draft_vocabulary import count_trained_tokens
from ligertune.features.draft.recipe import DraftSpec
from ligertune.files.storage import read_metrics
from ligertune.planning.feature_spec import ResultTable

if TYPE_CHECKING:
    from ligertune.features.task import TrainedModel


@dataclass(frozen=True)
class Acceptance:
    """An evaluation. alphas: mean of Σ min(p, q) at each step. accepted_length: expected, of `drafts` drafts."""

    step: int
    alphas: list[float]
    accepted_length: float


@dataclass(frozen=True)
class DraftReport:
    """before: at step 0; None unless the run evaluated there. after: of the written head; None without evaluations."""

    data: list[str]
    examples: int
    steps: int
    drafts: int  # draft.num_speculative_tokens
    coverage: float | None  # share of the trained tokens that the head can draft; None for streamed data
    before: Acceptance | None
    after: Acceptance | None

    def as_dict(self) -> dict[str, Any]:
        """Return the values for report.json."""
        return dataclasses.asdict(self)

    def card_rows(self) -> list[tuple[str, str]]:
        """Return rows of README.md."""
        rows = [
            ("Trained on", ", ".join(self.data)),
            ("Training examples", f"{self.examples:,}"),
            ("Training steps", f"{self.steps:,}"),
        ]
        if self.coverage is not None:
            rows.append(("The draft vocabulary covers", f"{self.coverage:.2%} of the trained tokens"))
        if self.after is not None:
            alphas = ", ".join(f"{alpha:.1%}" for alpha in self.after.alphas)
            rows.append(("Expected acceptance of drafts 1, 2, ... on held-out data, at temperature 1", alphas))
            before = "" if self.before is None else f"; before training {self.before.accepted_length:.2f}"
            length = f"{self.after.accepted_length:.2f} with {plural(self.drafts, 'draft')}{before}"
            rows.append(("Expected accepted length", length))
        return rows


def draft_report(trained: TrainedModel, head: DraftHead) -> DraftReport:
    """Return the report of a run, from its evaluations in metrics.jsonl. head: the written one, with whole tensors."""
    plan = trained.plan
    lines = read_metrics(plan.output_dir / "metrics.jsonl")
    found = [_acceptance(line) for line in lines if "eval_accepted_length" in line]
    after = [one for one in found if one.step > 0]
    if plan.checkpoint.load_best_model_at_end:  # the first of the best ones, as the run keeps it
        written = max(after, key=lambda one: one.accepted_length, default=None)
    else:
        written = after[-1] if after else None
    return DraftReport(
        data=[Path(dataset.path).name if Path(dataset.path).exists() else dataset.path
              for dataset in plan.data_options.datasets],
        examples=plan.data.examples,
        steps=max((line["step"] for line in lines), default=0),
        drafts=plan.build.section(DraftSpec).num_speculative_tokens,
        coverage=_coverage(trained, head),
        before=next((one for one in found if one.step == 0), None),
        after=written,
    )  # fmt: skip


def _acceptance(line: Mapping[str, Any]) -> Acceptance:
    """Return an evaluation of metrics.jsonl."""
    alphas: list[float] = []
    while (alpha := line.get(f"eval_alpha_{len(alphas) + 1}")) is not None:
        alphas.append(alpha)
    return Acceptance(line["step"], alphas, line["eval_accepted_length"])


def _coverage(trained: TrainedModel, head: DraftHead) -> float | None:
    """Return the share of the trained tokens that the head can draft."""
    examples = trained.data.examples_in_memory
    if examples is None:
        return None
    counts = np.array(count_trained_tokens(examples))
    ids = head.draft_ids().cpu().numpy()
    return float(counts[ids[ids < len(counts)]].sum() / max(counts.sum(), 1))


def acceptance_tables(found: Mapping[str, Any]) -> Sequence[ResultTable]:
    """Return expected acceptance by position before and after training. found: `DraftReport.as_dict()`."""
    rows = []
    for name in ("before", "after"):
        if (one := found[name]) is None:
            continue
        when = f"after step {one['step']:,}" if one["step"] else "before training"
        rows.append([when, *(f"{alpha:.1%}" for alpha in one["alphas"]), f"{one['accepted_length']:.2f}"])
    if not rows:
        return ()
    positions = (f"draft {position}" for position in range(1, len(rows[0]) - 1))
    header = ("", *positions, f"accepted length of {plural(found['drafts'], 'draft')}")
    title = "Expected acceptance on held-out data, if the drafts before are accepted"
    return (ResultTable(title, rows, header=header),)
