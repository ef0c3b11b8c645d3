"""Answer a prompt with a trained model: the prompt is put in the template that training used."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ligertune.data.templates.prompts import alpaca_prompt
from ligertune.decode.image_prompt import prompt_inputs, with_images
from ligertune.errors import UserError
from ligertune.models.load import auto_class, hide_loading_bars
from ligertune.models.save import ADAPTER_CONFIG, adapter_base_model, read_prompt
from ligertune.vision.reader import saved_reader


@dataclass(frozen=True)
class Answer:
    """What the model wrote after the prompt."""

    prompt: str  # as the model saw it
    text: str
    new_tokens: int
    seconds: float

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


def complete(
    model_name: str,
    prompt: str,
    *,
    raw: bool,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    images: Sequence[str] = (),
) -> Answer:
    """Load, put the prompt in its template (unless `raw`), generate. temperature 0 is greedy.

    images: files that a model that sees is shown, where `<image>` stands in the prompt, or before it.
    """
    check_prompt(prompt)
    model, tokenizer = load_for_generation(model_name)
    reader = saved_reader(model_name, model.config, tokenizer)
    if images and reader is None:
        raise UserError(f"--image: {model_name} is a model of text.", hint="Leave the image out.")
    if reader is None:
        text, ids = encode_prompt(tokenizer, prompt, Path(model_name), raw=raw)
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    else:
        how = {"prompt_template": "raw"} if raw else read_prompt(Path(model_name))
        text, writes_special, pictures = with_images(reader, tokenizer, prompt, images, how)
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=not writes_special)["input_ids"]
        inputs = prompt_inputs(reader, tokens, pictures)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    torch.manual_seed(seed)
    start = time.perf_counter()
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature > 0 else {"do_sample": False}
    )
    with torch.no_grad():
        output = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
    new = output[0, inputs["input_ids"].shape[1] :]
    return Answer(
        prompt=text,
        text=tokenizer.decode(new, skip_special_tokens=True),
        new_tokens=len(new),
        seconds=time.perf_counter() - start,
    )


def load_for_generation(
    model_name: str, *, tokenizer_name: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on the GPU if there is one, and its tokenizer; a UserError where they cannot be loaded."""
    hide_loading_bars()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = _loaded(tokenizer_name or model_name, AutoTokenizer)
    config = _loaded(_described_by(model_name), AutoConfig)
    return _loaded(model_name, auto_class(config)).to(device).eval(), tokenizer


def _described_by(model_name: str) -> str:
    """Where the model's configuration is: of an adapter, with the model that it was made for."""
    folder = Path(model_name)
    alone = (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()
    return adapter_base_model(folder) if alone else model_name


def _loaded(model_name: str, auto: type) -> Any:
    """What transformers loads from a folder or the hub by this class."""
    try:
        return auto.from_pretrained(model_name)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"{model_name} could not be loaded as a causal language model: {str(problem).splitlines()[0]}",
            hint="Name a folder with config.json, the weights and the tokenizer, or a hub id. "
            "A folder of Medusa heads needs --medusa.",
        ) from problem


def check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise UserError("The prompt is empty.", hint="Write what to ask, or - to read it from stdin.")


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, folder: Path, *, raw: bool) -> tuple[str, list[int]]:
    """The prompt in the template that `folder` notes (unless `raw`), and its ids; a UserError where it is empty."""
    check_prompt(prompt)
    how = {"prompt_template": "raw"} if raw else read_prompt(folder)
    text, writes_special = in_template(tokenizer, prompt, how)
    return text, tokenizer(text, add_special_tokens=not writes_special)["input_ids"]


def in_template(tokenizer: PreTrainedTokenizerBase, prompt: str, how: dict) -> tuple[str, bool]:
    """The prompt as training showed it, up to where the answer begins; whether it holds its special tokens (BOS)."""
    if how["prompt_template"] == "raw" or (how["prompt_template"] == "chat" and not tokenizer.chat_template):
        return prompt, False
    if how["prompt_template"] == "alpaca":
        return alpaca_prompt(prompt, "", how["system_prompt"]), False
    system = [{"role": "system", "content": how["system_prompt"]}] if how["system_prompt"] else []
    messages = [*system, {"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), True
