"""Saved models: write weights, tokenizer and prompt format so that Hugging Face's tools and `generate` load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ligertune.errors import UserError
from ligertune.storage import put_in_place, remove, writing
from ligertune.vision.reader import save_processor

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ligertune.vision.reader import ImageReader

PROMPT_FILE = "ligertune.json"  # saved with the model, so that generation uses the prompt template of training
ADAPTER_CONFIG = "adapter_config.json"


@writing("The model")
def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    state_dict: dict[str, torch.Tensor] | None,
    prompt_template: str,
    system_prompt: str | None,
    images: ImageReader | None = None,
) -> None:
    """Write weights (safetensors), configuration, tokenizer and image processor; `folder` appears only when complete.

    state_dict: the gathered weights if the model's own are sharded.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    remove(aside)
    # Without this option peft asks the hub whether the embedding was resized.
    options = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
    model.save_pretrained(aside, state_dict=state_dict and without_tied(model, state_dict), **options)
    (aside / "README.md").unlink(missing_ok=True)  # peft's, with placeholders only; `export` writes a model card
    tokenizer.save_pretrained(aside)
    if images is not None:
        save_processor(images, aside)
    write_prompt(aside, prompt_template=prompt_template, system_prompt=system_prompt)
    put_in_place(aside, folder)


def without_tied(model: PreTrainedModel, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep tied weights under their first name only: gathered, they are copies that safetensors would write twice."""
    first: dict[int, str] = {}
    tied = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }
    return {name: tensor for name, tensor in state_dict.items() if name not in tied}


def prompt_of(template: str, system_prompt: str | None) -> dict[str, str | None]:
    """Return the prompt of `write_prompt` for the template that the training data had."""
    return {
        "prompt_template": {"alpaca": "alpaca", "plain": "raw"}.get(template, "chat"),
        "system_prompt": system_prompt,
    }


def write_prompt(folder: Path, *, prompt_template: str, system_prompt: str | None) -> None:
    """Write the prompt template and system prompt of training."""
    prompt = {"prompt_template": prompt_template, "system_prompt": system_prompt}
    (folder / PROMPT_FILE).write_text(json.dumps(prompt, indent=1) + "\n", encoding="utf-8")


def read_prompt(folder: Path) -> dict:
    """Return {prompt_template, system_prompt} of a saved model; other models get their chat template."""
    path = folder / PROMPT_FILE
    if not path.is_file():
        return {"prompt_template": "chat", "system_prompt": None}
    return json.loads(path.read_text(encoding="utf-8"))


def adapter_base_model(folder: Path) -> str:
    """Return the folder or hub id of the model that a saved adapter belongs to. Raises UserError if it is not named."""
    base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if base is None:
        raise UserError(f"{folder} does not name the model that its adapter belongs to (base_model_name_or_path).")
    return base
