"""Chat template names of Axolotl, LLaMA-Factory and alignment-handbook, as the names of built-in templates."""

from __future__ import annotations

from typing import Any

# name in a file of another tool -> the built-in template with this text; a test compares the names with the files
TEMPLATES = {
    "alpaca": "alpaca",
    "chatml": "chatml",
    "cohere": "command-r",
    "command_r": "command-r",
    "deepseek": "deepseek",
    "deepseek_v2": "deepseek",
    "deepseek3": "deepseek3",
    "deepseek_v3": "deepseek3",
    "gemma": "gemma",
    "gemma2": "gemma",
    "granite": "granite",
    "granite3": "granite",
    "hermes": "chatml",
    "hermes2": "chatml",
    "llama2": "llama2",
    "llama3": "llama3",
    "mistral": "mistral",
    "mistral_v1": "mistral",
    "mistral_v2v3": "mistral-v3",
    "phi": "phi3",
    "phi3": "phi3",
    "phi_3": "phi3",
    "phi_35": "phi3",
    "phi4": "phi4",
    "phi_4": "phi4",
    "qwen": "qwen2.5",
    "qwen2": "qwen2",
    "qwen_25": "qwen2.5",
    "tulu": "tulu",
    "vicuna": "vicuna",
    "yi": "chatml",
    "zephyr": "zephyr",
}
# the tokenizer's own template: by name, or because models of this family always have it
TOKENIZERS = ("tokenizer_default", "tokenizer", "default", "empty", "")
ALWAYS_IN_THE_TOKENIZER = ("qwen",)


def template_of(name: Any, model: Any) -> str | None:
    """Return the built-in template of this name; "tokenizer" for the tokenizer's own, None for an unknown one."""
    if name in TOKENIZERS:
        return "tokenizer"
    # a family of models whose tokenizers all have the template; theirs also has a place for tools
    family = next((family for family in ALWAYS_IN_THE_TOKENIZER if family in str(name).lower()), None)
    if family and family in str(model).lower():
        return "tokenizer"
    return TEMPLATES.get(str(name).replace("-", "_"))
