"""What heads came to: how often each is right, how many tokens a pass accepts, and the speed beside plain decoding."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ligertune.decode.tree_decoding import decode_with_heads
from ligertune.tasks.medusa.candidate_tree import Tree
from ligertune.tasks.medusa.head_form import HeadForm
from ligertune.tasks.medusa.heads import MedusaHeads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Decoding:
    """The same prompts decoded greedily with heads and by `model.generate`, one at a time."""

    prompts: int
    new_tokens: int
    accepted_length: float  # tokens a pass; plain decoding gives one
    identical: int  # prompts whose text is that of plain decoding, token for token
    tokens_per_second: float
    plain_tokens_per_second: float
    speed_up: float


@dataclass(frozen=True)
class MedusaReport:
    """Accuracies are shares of the held-out targets, by head; `decoding` is None where it was not asked for."""

    measured_on: str
    top1: list[float]
    top5: list[float]
    tree_nodes: int  # the root among them
    tree_depth: int
    decoding: Decoding | None

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


def prompt_of(input_ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """What comes before the first trained token; of a text that is trained from its start, the first quarter."""
    trained = next((i for i, label in enumerate(labels) if label != -100), len(labels))
    length = trained if trained > 1 else max(1, min(32, len(input_ids) // 4))
    return [int(token) for token in input_ids[:length]]


def end_of_text(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens at which `generate` stops."""
    found = model.generation_config.eos_token_id
    return () if found is None else tuple(found) if isinstance(found, list | tuple) else (found,)


@torch.no_grad()
def measure_decoding(
    model: PreTrainedModel,
    heads: MedusaHeads,
    form: HeadForm,
    prompts: Sequence[Sequence[int]],
    tree: Tree,
    *,
    max_new_tokens: int,
) -> Decoding:
    """Decode each prompt both ways. The first is decoded once before, unmeasured."""
    model.eval()
    device = model.get_input_embeddings().weight.device

    def with_heads(prompt: Sequence[int]) -> tuple[list[int], int]:
        found = decode_with_heads(
            model, heads, form, [prompt], tree, max_new_tokens=max_new_tokens, eos_token_ids=end_of_text(model)
        )
        return found.tokens[0], found.passes[0]

    def plainly(prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)], device=device)
        pad = {"pad_token_id": end_of_text(model)[0]} if end_of_text(model) else {}
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **pad
        )
        return output[0, len(prompt) :].tolist()

    ways = {"heads": with_heads, "plain": plainly}
    texts: dict[str, list] = {name: [] for name in ways}
    seconds = dict.fromkeys(ways, 0.0)
    for i, prompt in enumerate([prompts[0], *prompts]):
        for name, decode in ways.items():  # in turns, so that other work on the machine slows both
            _wait(device)
            start = time.perf_counter()
            text = decode(prompt)
            _wait(device)
            if i:
                seconds[name] += time.perf_counter() - start
                texts[name].append(text)
    new = sum(len(text) for text, _ in texts["heads"])
    speed = new / seconds["heads"]
    plain_speed = sum(map(len, texts["plain"])) / seconds["plain"]
    return Decoding(
        prompts=len(prompts),
        new_tokens=new,
        accepted_length=new / max(1, sum(passes for _, passes in texts["heads"])),
        identical=sum(text == plain for (text, _), plain in zip(texts["heads"], texts["plain"], strict=True)),
        tokens_per_second=speed,
        plain_tokens_per_second=plain_speed,
        speed_up=speed / plain_speed,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
