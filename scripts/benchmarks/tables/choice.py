"""Configurations of the benchmark of chosen settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    """What is trained, and the memory limit.

    length: tokens of a row. rows: of an optimizer step. memory: GiB that torch may allocate; None: the whole GPU.
    layers: the first ones that are kept; None: all.
    """

    model: str
    method: str
    length: int
    rows: int
    memory: int | None = None
    layers: int | None = None


CONFIGURATIONS = {
    "llama-1b full": Configuration("Llama-3.2-1B", "full", 2048, 16),
    "llama-1b full, 24 GiB": Configuration("Llama-3.2-1B", "full", 2048, 16, 24),
    "llama-1b full, 512 tokens": Configuration("Llama-3.2-1B", "full", 512, 32, 80),
    "llama-1b lora, 32k tokens": Configuration("Llama-3.2-1B", "lora", 32768, 2, 24),
    "llama-8b full": Configuration("Meta-Llama-3-8B", "full", 2048, 8),
    "llama-8b lora, 80 GiB": Configuration("Meta-Llama-3-8B", "lora", 4096, 4, 80),
    "llama-8b lora, 512 tokens": Configuration("Meta-Llama-3-8B", "lora", 512, 32),
    "llama-8b qlora, 24 GiB": Configuration("Meta-Llama-3-8B", "qlora", 4096, 4, 24),
    "qwen3.5-4b full, 80 GiB": Configuration("Qwen3.5-4B", "full", 2048, 8, 80),
    "qwen3.5-4b lora, 24 GiB": Configuration("Qwen3.5-4B", "lora", 8192, 2, 24),
    "mixtral full": Configuration("mixtral-8x7b", "full", 2048, 8, None, 4),
    "olmoe lora, 24 GiB": Configuration("olmoe-1b-7b", "lora", 4096, 4, 24, 8),
}
