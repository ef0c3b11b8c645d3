"""Answer a prompt with a trained model: the prompt is put in the template that training used."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from ligertune.data.prompts import alpaca_prompt
from ligertune.decode.seeing import prompt_inputs, with_images
from ligertune.errors import UserError
from ligertune.model.export import read_prompt
from ligertune.model.load import auto_class, hide_loading_bars
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
    if not prompt.strip():
        raise UserError("The prompt is empty.", hint="Write what to ask, or - to read it from stdin.")
    hide_loading_bars()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, tokenizer = _loaded(model_name, AutoConfig), _loaded(model_name, AutoTokenizer)
    how = {"prompt_template": "raw"} if raw else read_prompt(Path(model_name))
    reader = saved_reader(model_name, config, tokenizer)
    if images and reader is None:
        raise UserError(f"--image: {model_name} is a model of text.", hint="Leave the image out.")
    if reader is None:
        text, writes_special = in_template(tokenizer, prompt, how)
    else:
        text, writes_special, pictures = with_images(reader, tokenizer, prompt, images, how)
    model = _loaded(model_name, auto_class(config)).to(device).eval()
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not writes_special)
    inputs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    if reader is not None:
        inputs = prompt_inputs(reader, inputs["input_ids"], pictures)
    inputs = {name: value.to(device) for name, value in inputs.items()}
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


def _loaded(model_name: str, auto: type) -> Any:
    """What transformers loads from a folder or the hub by this class."""
    try:
        return auto.from_pretrained(model_name)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"{model_name} could not be loaded as a causal language model: {str(problem).splitlines()[0]}",
            hint="Name a folder with config.json, the weights and the tokenizer, or a hub id.",
        ) from problem


def in_template(tokenizer: PreTrainedTokenizerBase, prompt: str, how: dict) -> tuple[str, bool]:
    """The prompt as training showed it, up to where the answer begins; whether it holds its special tokens (BOS)."""
    if how["prompt_template"] == "raw" or (how["prompt_template"] == "chat" and not tokenizer.chat_template):
        return prompt, False
    if how["prompt_template"] == "alpaca":
        return alpaca_prompt(prompt, "", how["system_prompt"]), False
    system = [{"role": "system", "content": how["system_prompt"]}] if how["system_prompt"] else []
    messages = [*system, {"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), True
