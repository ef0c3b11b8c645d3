"""Medusa report: accuracy of each head, tokens accepted per forward pass, and decoding speed against plain generate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ligertune.decode.speculative.cached_text import eos_token_ids
from ligertune.decode.speculative.candidate_tree import CandidateTree, best_paths
from ligertune.decode.speculative.plain_decoding import decode_plainly, prompt_token_ids, timed
from ligertune.errors import format_rate
from ligertune.features.medusa.decode.tree_decoding import decode_with_heads
from ligertune.features.medusa.heads_loss import IGNORE_INDEX, shifted_targets, target_shifts
from ligertune.files.plots import has_matplotlib, new_figure, save_figure
from ligertune.files.storage import write_json
from ligertune.models.compile import run_eagerly
from ligertune.models.score_head import lm_head_of

if TYPE_CHECKING:
    from ligertune.data.examples import Examples
    from ligertune.features.medusa.medusa_model import MedusaModel

RANKS = 10  # top tokens of a head that trees and reports use; published trees go as far
ROWS = 512  # rows whose logits are held at once: 131 MB in bfloat16 with a vocabulary of 128,000


@dataclass(frozen=True)
class DecodingSpeed:
    """The same prompts decoded greedily, one at a time, with heads and by `model.generate`."""

    prompts: int
    new_tokens: int
    accepted_length: float  # tokens per forward pass; plain decoding has 1
    identical: int  # prompts whose text equals that of plain decoding, token for token
    tokens_per_second: float
    plain_tokens_per_second: float
    speed_up: float


@dataclass(frozen=True)
class MedusaReport:
    """Accuracies are shares of the held-out targets, one per head. `decoding` is None without medusa.eval_prompts."""

    measured_on: str
    top1: list[float]
    top5: list[float]
    tree_nodes: int  # with the root
    tree_depth: int
    decoding: DecodingSpeed | None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@torch.no_grad()
def head_accuracy(model: MedusaModel, examples: Examples) -> list[list[float]]:
    """Return accuracy[k][r]: the share of head k + 1's targets that the head ranks r-th (from 0; r < RANKS).

    Column 0 is top-1 accuracy, the sum of the first five columns top-5. A head without targets has zeros.
    """
    heads = model.medusa_head
    weight = lm_head_of(model.base_model).weight
    shifts = target_shifts(len(heads), with_model=False)
    n_ranks = min(RANKS, len(weight))
    right = torch.zeros(len(heads), n_ranks, dtype=torch.float64, device=weight.device)
    count = torch.zeros(len(heads), 1, dtype=torch.float64, device=weight.device)
    was_training = model.training
    model.eval()
    with run_eagerly():
        for example in examples:
            input_ids, labels = (
                torch.from_numpy(row.astype("int64"))[None].to(weight.device)
                for row in (example.input_ids, example.labels)
            )
            targets = shifted_targets(labels, None, shifts).flatten(1)  # (K, N)
            hidden = model.last_hidden_state(input_ids, use_cache=False).flatten(0, 1)  # (N, E)
            for k, projection in enumerate(heads.projections(weight)):
                for rows in torch.split((targets[k] != IGNORE_INDEX).nonzero().squeeze(1), ROWS):
                    logits = heads.blocks(k)(hidden[rows]) @ projection.t()
                    hits = logits.topk(n_ranks, dim=-1).indices == targets[k, rows, None]
                    right[k] += hits.sum(0)
                    count[k] += len(rows)
    model.train(was_training)
    return (right / count.clamp(min=1)).tolist()


def measure_heads(
    model: MedusaModel, examples: Examples, measured_on: str, accuracy: list[list[float]]
) -> MedusaReport:
    """Measure decoding with the best tree for `accuracy`. Afterwards `model` uses an attention that takes any mask."""
    spec = model.spec
    base = model.base_model
    tree = CandidateTree.from_paths(best_paths(accuracy, spec.tree_nodes), device=lm_head_of(base).weight.device)
    decoding = None
    if spec.eval_prompts:
        base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
        chosen = (examples[i] for i in range(min(spec.eval_prompts, len(examples))))
        prompts = [prompt_token_ids(example.input_ids, example.labels) for example in chosen]
        with run_eagerly():
            decoding = measure_decoding(model, prompts, tree, max_new_tokens=spec.eval_new_tokens)
    return MedusaReport(
        measured_on=measured_on,
        top1=[row[0] for row in accuracy],
        top5=[sum(row[:5]) for row in accuracy],
        tree_nodes=len(tree),
        tree_depth=tree.depth,
        decoding=decoding,
    )


@torch.no_grad()
def measure_decoding(
    model: MedusaModel, prompts: Sequence[Sequence[int]], tree: CandidateTree, *, max_new_tokens: int
) -> DecodingSpeed:
    """Decode each prompt with heads and by `model.generate`. The first prompt is decoded once more, as a warm-up."""
    base = model.base_model
    base.eval()
    options = {"max_new_tokens": max_new_tokens, "stop_at": eos_token_ids(base)}
    runs = []
    for prompt in [prompts[0], *prompts]:
        # The two ways take turns, so that other work on the machine slows both.
        with_heads = timed(
            base.device, decode_with_heads, base, model.medusa_head, model.transform, [prompt], tree, **options
        )
        runs.append((*with_heads, *timed(base.device, decode_plainly, base, prompt, max_new_tokens)))
    found, seconds, plain, plain_seconds = zip(*runs[1:], strict=True)
    new_tokens = sum(len(decoded.tokens[0]) for decoded in found)
    speed = new_tokens / sum(seconds)
    plain_speed = sum(map(len, plain)) / sum(plain_seconds)
    return DecodingSpeed(
        prompts=len(prompts),
        new_tokens=new_tokens,
        accepted_length=new_tokens / max(1, sum(decoded.passes[0] for decoded in found)),
        identical=sum(decoded.tokens[0] == text for decoded, text in zip(found, plain, strict=True)),
        tokens_per_second=speed,
        plain_tokens_per_second=plain_speed,
        speed_up=speed / plain_speed,
    )


def write_report(report: MedusaReport, output_dir: Path) -> None:
    """Write medusa_report.json, and medusa_report.png if matplotlib is installed."""
    write_json(output_dir / "medusa_report.json", report.as_dict())
    if has_matplotlib():
        _draw(report, output_dir / "medusa_report.png")


def _draw(report: MedusaReport, path: Path) -> None:
    heads = range(1, len(report.top1) + 1)
    figure = new_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    left.bar([h - 0.2 for h in heads], report.top1, width=0.4, label="top-1", color="#1f5fa8")
    left.bar([h + 0.2 for h in heads], report.top5, width=0.4, label="top-5", color="#9cc3ea")
    left.set(title="Accuracy on held-out data", xlabel="head", ylabel="share of targets", ylim=(0, 1))
    left.set_xticks(list(heads))
    left.legend(frameon=False)
    found = report.decoding
    if found is None:
        right.set_axis_off()
    else:
        speeds = [found.plain_tokens_per_second, found.tokens_per_second]
        bars = right.bar(["plain generate", "with heads"], speeds, color=["#8a8a8a", "#1f5fa8"])
        right.bar_label(bars, list(map(format_rate, speeds)))
        title = f"{found.accepted_length:.2f} tokens per forward pass, {found.speed_up:.2f}x"
        right.set(title=title, ylabel="tokens/s, one prompt")
    save_figure(figure, path, dpi=140)
