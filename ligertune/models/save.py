"""Write a trained model so that Hugging Face's tools, and `ligertune generate`, load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ligertune.storage import put_in_place, remove, writing
from ligertune.vision.reader import save_processor

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ligertune.vision.reader import ImageReader

# beside config.json: how prompts looked in training, so that generation asks in the same words
PROMPT_FILE = "ligertune.json"


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
    """Weights (safetensors), configuration, tokenizer with its chat template, image processor. Complete or absent.

    `state_dict`: the gathered weights where the model's own are sharded.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    remove(aside)
    # an adapter's folder holds the adapter; peft would ask the hub whether the embedding was resized
    options = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
    model.save_pretrained(aside, state_dict=state_dict and once(model, state_dict), **options)
    tokenizer.save_pretrained(aside)
    if images is not None:
        save_processor(images, aside)
    write_prompt(aside, prompt_template=prompt_template, system_prompt=system_prompt)
    put_in_place(aside, folder)


def once(model: PreTrainedModel, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied weights under their first name only: gathered, they are copies that no longer say so themselves."""
    first: dict[int, str] = {}
    again = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }
    return {name: tensor for name, tensor in state_dict.items() if name not in again}


def write_prompt(folder: Path, *, prompt_template: str, system_prompt: str | None) -> None:
    """Note how prompts looked in training."""
    prompt = {"prompt_template": prompt_template, "system_prompt": system_prompt}
    (folder / PROMPT_FILE).write_text(json.dumps(prompt, indent=1) + "\n", encoding="utf-8")


def read_prompt(folder: Path) -> dict:
    """What `write_model` noted about prompts; for other models the chat template is assumed."""
    path = folder / PROMPT_FILE
    if not path.is_file():
        return {"prompt_template": "chat", "system_prompt": None}
    return json.loads(path.read_text(encoding="utf-8"))
