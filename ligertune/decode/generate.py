"""Answer a prompt, with images if the model takes them, in the prompt template of training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ligertune.data.rows.conversation import BadRow, Conversation, Message
from ligertune.data.rows.image_rows import IMAGE_MARK, ImageTokens, extract_images, image_parts
from ligertune.data.templates.control_tokens import Rendered
from ligertune.data.templates.prompt_templates import alpaca_prompt
from ligertune.errors import UserError
from ligertune.models.compile import run_eagerly
from ligertune.models.load import auto_class, hide_loading_bars
from ligertune.models.save import ADAPTER_CONFIG, adapter_base_model, read_prompt
from ligertune.planning.options import ModelOptions
from ligertune.vision.image_files import ImageFile
from ligertune.vision.inputs import image_inputs
from ligertune.vision.reader import ImageReader, load_reader

SAMPLE_TOKENS = 64  # new tokens of an answer during training


@dataclass(frozen=True)
class Answer:
    """A prompt and the text that the model generated after it."""

    prompt: str  # with the prompt template
    text: str
    new_tokens: int
    seconds: float


def generate_answer(
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
    """Load a model and generate an answer. Raises UserError.

    raw: continue the prompt without a template. temperature 0 is greedy. images: files for a vision-language model, one
    for each `<image>` in the prompt, or placed before it.
    """
    check_prompt(prompt)
    model, tokenizer = load_for_generation(model_name)
    reader = load_reader(ModelOptions(model_name_or_path=model_name), None, model.config, tokenizer)
    if images and reader is None:
        raise UserError(f"--image: {model_name} is a text model.", hint="Leave the image out.")
    if reader is None:
        text, ids = encode_prompt(tokenizer, prompt, Path(model_name), raw=raw)
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    else:
        template = {"prompt_template": "raw"} if raw else read_prompt(Path(model_name))
        text, inputs = _encode_with_images(reader, tokenizer, prompt, images, template)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    torch.manual_seed(seed)
    start = time.perf_counter()
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    with torch.no_grad():
        output = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
    new = output[0, inputs["input_ids"].shape[1] :]
    answer, seconds = tokenizer.decode(new, skip_special_tokens=True), time.perf_counter() - start
    return Answer(prompt=text, text=answer, new_tokens=len(new), seconds=seconds)


def load_for_generation(
    model_name: str, *, tokenizer_name: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, onto the GPU if there is one, and its tokenizer. Raises UserError if they cannot be loaded."""
    hide_loading_bars()
    folder = Path(model_name)
    only_adapter = (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()
    tokenizer = _load(tokenizer_name or model_name, AutoTokenizer)
    config = _load(adapter_base_model(folder) if only_adapter else model_name, AutoConfig)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _load(model_name, auto_class(config)).to(device).eval(), tokenizer


def _load(model_name: str, auto: type) -> Any:
    try:
        return auto.from_pretrained(model_name)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"{model_name} could not be loaded as a causal language model: {str(problem).splitlines()[0]}",
            hint="Name a folder with config.json, the weights and the tokenizer, or a hub id. "
            "A folder of Medusa heads needs --medusa.",
        ) from problem


def check_prompt(prompt: str) -> None:
    """Raise UserError if the prompt is empty."""
    if not prompt.strip():
        raise UserError("The prompt is empty.", hint="Write a prompt, or - to read it from stdin.")


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, folder: Path, *, raw: bool) -> tuple[str, list[int]]:
    """Return the prompt in the template saved in `folder` (unless `raw`), and its token ids."""
    check_prompt(prompt)
    template = {"prompt_template": "raw"} if raw else read_prompt(folder)
    text, has_bos = format_prompt(tokenizer, prompt, template)
    return text, tokenizer(text, add_special_tokens=not has_bos)["input_ids"]


def format_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, template: dict) -> tuple[str, bool]:
    """Return (prompt as in training, up to the answer; whether it already has its special tokens such as BOS).

    template: {prompt_template, system_prompt}, from `read_prompt`.
    """
    if template["prompt_template"] == "alpaca":
        return alpaca_prompt(prompt, "", template["system_prompt"]), False
    if not _uses_chat_template(tokenizer, template):
        return prompt, False
    return _chat_prompt(tokenizer, prompt, template), True


def _uses_chat_template(tokenizer: PreTrainedTokenizerBase, template: dict) -> bool:
    return template["prompt_template"] == "chat" and bool(tokenizer.chat_template)


def _chat_prompt(tokenizer: PreTrainedTokenizerBase, content: str | list[dict], template: dict) -> str:
    system = [{"role": "system", "content": template["system_prompt"]}] if template["system_prompt"] else []
    messages = [*system, {"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _encode_with_images(
    reader: ImageReader, tokenizer: PreTrainedTokenizerBase, prompt: str, images: Sequence[str], template: dict
) -> tuple[str, dict[str, Tensor]]:
    """Return (prompt with one token per image, inputs of `generate`), prepared as rows with images are for training."""
    image_tokens = ImageTokens(reader, str(Path.cwd()))
    has_bos = _uses_chat_template(tokenizer, template)
    try:
        row, references = extract_images({"messages": [{"role": "user", "content": prompt}], "images": list(images)})
        marked = row["messages"][0]["content"]
        files = image_tokens.find(Conversation((Message("user", marked),)), references, "")
        text = marked
        if has_bos:
            takes_parts = "image" in tokenizer.chat_template
            content = image_parts(marked) if takes_parts else IMAGE_MARK.sub(reader.template_text, marked)
            text = _chat_prompt(tokenizer, content, template)
        text = image_tokens.insert(Rendered(text, ()), files).text
    except BadRow as bad:
        raise UserError(f"--image: {bad}.", hint="Name a file for each <image> in the prompt, or write none.") from bad
    input_ids = tokenizer(text, return_tensors="pt", add_special_tokens=not has_bos)["input_ids"]
    return text, _expand_images(reader, input_ids, files)


def _expand_images(reader: ImageReader, input_ids: Tensor, files: Sequence[ImageFile]) -> dict[str, Tensor]:
    """Repeat each image token of input_ids (1, T) as often as its image needs, and add the pixels."""
    repeats = torch.ones(input_ids.shape[1], dtype=torch.long)
    repeats[input_ids[0] == reader.token_id] = torch.tensor([reader.tokens(file) for file in files])
    input_ids = input_ids[0].repeat_interleave(repeats)[None]
    inputs = image_inputs(reader, input_ids, [[reader.pixels(file.path) for file in files]])
    if reader.family.positions == "sections":  # `generate` computes position ids from the token types
        del inputs["position_ids"]
        inputs["mm_token_type_ids"] = (input_ids == reader.token_id).long()
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **inputs}


@dataclass(frozen=True)
class SampleAnswers:
    """Greedy answers to fixed prompts, to follow a model while it trains. No random numbers are drawn.

    template: {prompt_template, system_prompt}, from `read_prompt`.
    """

    prompts: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    template: dict
    pad_token_id: int

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel) -> list[dict[str, str]]:
        """Return {prompt, answer} for each prompt."""
        was_training, found = model.training, []
        model.eval()
        for prompt in self.prompts:
            text, has_bos = format_prompt(self.tokenizer, prompt, self.template)
            inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=not has_bos)
            ids = inputs["input_ids"].to(next(model.parameters()).device)
            with run_eagerly():
                output = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=SAMPLE_TOKENS,
                    do_sample=False,
                    pad_token_id=self.pad_token_id,
                )
            answer = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            found.append({"prompt": prompt, "answer": answer})
        model.train(was_training)
        return found
