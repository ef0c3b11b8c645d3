"""Rows of the context benchmark: a method in the memory of a card, and what unsloth publishes for it."""

from __future__ import annotations

from dataclasses import dataclass

# GB of the card -> GiB that torch sees: L4 and A10, A100 40GB, L40S, H100 80GB
CARDS = {24: 22.0, 40: 39.4, 48: 44.4, 80: 79.1}
# unsloth's table for Llama-3.1-8B, QLoRA r32, batch 1 (unsloth.ai, read 2026-11): GB -> tokens
UNSLOTH = {24: 78475, 40: 153977, 48: 191728, 80: 342733}
RANK = 32
METHODS = {
    "qlora": {"method.type": "qlora", "method.lora_r": RANK, "method.lora_alpha": RANK},
    "lora": {"method.type": "lora", "method.lora_r": RANK, "method.lora_alpha": RANK},
    "full": {"train.optim": "adamw_8bit", "train.optim_in_backward": True, "train.max_grad_norm": 0.0},
}


@dataclass(frozen=True)
class Row:
    """A method on a card. published: tokens of unsloth's table."""

    method: str
    card: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.card}"

    @property
    def published(self) -> int | None:
        return UNSLOTH[self.card] if self.method == "qlora" else None


ROWS = (*(Row("qlora", card) for card in CARDS), Row("lora", 24), Row("lora", 40), Row("lora", 80), Row("full", 80))
