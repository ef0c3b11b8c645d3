"""Answer a prompt, with images if the model takes them, in the prompt template of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ligertune.any_types import AnyModule
from ligertune.data.bad_rows import BadRow
from ligertune.data.modalities.modality import MARK, ModalityReader, marked_parts, modality_of
from ligertune.data.rows.conversation import Conversation, Message
from ligertune.data.templates.bounded_jinja import TemplateRefusalError, render_chat_template, template_name
from ligertune.data.templates.control_tokens import Rendered
from ligertune.data.templates.prompt_templates import alpaca_prompt
from ligertune.decode.answers.answer_ends import FiniteLogits
from ligertune.decode.batched_answers import AnswerRequest, answer_batches, refused_settings, sampling_settings_of
from ligertune.decode.sampling import Answer, Prompt, check_prompt_ids, sample_answers
from ligertune.errors import UserError, panics_as_errors, plural
from ligertune.files.storage import PROMPT_FILE
from ligertune.models.load import hide_loading_bars
from ligertune.models.save import SAVED_MODEL, load_saved, read_prompt, read_saved_config, saved_spec
from ligertune.models.score_head import SCORE_AUTO_CLASS, gives_scores
from ligertune.planning.options import ModelOptions

SAMPLE_TOKENS = 64  # new tokens of an answer during training

PromptFormat = dict[str, Any]  # {prompt_template, system_prompt}, from `read_prompt`


@dataclass(frozen=True)
class GeneratedText:
    """A prompt and the text that the model generated after it."""

    prompt: str  # with the prompt template
    text: str
    new_tokens: int
    seconds: float

    @property
    def speed(self) -> str:
        """Number of tokens and their rate, in words."""
        return f"{plural(self.new_tokens, 'token')}, {self.new_tokens / self.seconds:,.0f} tokens/s"


@dataclass(frozen=True)
class SpeculativeText(GeneratedText):
    """A text that a model verified, and how many tokens each of its forward passes accepted."""

    accepted_length: float  # tokens per forward pass
    tokens_per_second: float

    @property
    def speed(self) -> str:
        rate = f"{self.accepted_length:.2f} tokens per forward pass, {self.tokens_per_second:,.0f} tokens/s"
        return f"{plural(self.new_tokens, 'token')}, {rate}"


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen; temperature 0 is greedy decoding."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`. Beams have no text before they end."""
        if not self.temperature:
            return {"do_sample": False, "num_beams": 1}
        return {"do_sample": True, "num_beams": 1, "temperature": self.temperature, "top_p": self.top_p}


@dataclass(frozen=True)
class LoadedModel:
    """A model with all that its prompts need."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reader: ModalityReader | None  # None for a text model
    template: PromptFormat

    @property
    def uses_chat_template(self) -> bool:
        return _uses_chat_template(self.tokenizer, self.template)

    def with_system(self, text: str) -> LoadedModel:
        """Return the model with another system prompt; an empty text removes it.

        Raises UserError if the prompt format has no place for one.
        """
        if not self.uses_chat_template and self.template["prompt_template"] != "alpaca":
            raise UserError(
                "A system prompt has no place in plain text.", hint=f"{self.name} is prompted without a chat template."
            )
        template: PromptFormat = {**self.template, "system_prompt": text or None}
        return replace(self, template=template)


def load_model(name: str, *, raw: bool, trust_remote_code: bool = False) -> LoadedModel:
    """Load a folder or hub id. raw: texts are continued without a prompt template. Raises UserError."""
    hide_loading_bars()
    _refuse_scores(name, trust_remote_code)
    model, tokenizer = load_saved(name, trust_remote_code=trust_remote_code)
    modality = modality_of(model.config)
    reader = modality.load_reader(ModelOptions(model_name_or_path=name), None, tokenizer, SAVED_MODEL)
    folder = Path(name) if Path(name).is_dir() else _hub_snapshot(name)
    return LoadedModel(name, model, tokenizer, reader, choose_prompt(folder, raw=raw))


def _refuse_scores(name: str, trust_remote_code: bool) -> None:
    """Raise UserError for a model with a score head, before its weights are loaded."""
    config = read_saved_config(name, saved_spec(name, trust_remote_code=trust_remote_code))
    if config.architectures and gives_scores(config):
        raise UserError(
            f"{name} is a {config.architectures[0]}, which scores texts and writes none.",
            hint=f"Load it with transformers' {SCORE_AUTO_CLASS.__name__}, or score texts that have labels with "
            "ligertune eval RUN --data FILE --predict FILE.",
        )


def _hub_snapshot(name: str) -> Path:
    """Return the folder of the hub's cache with the prompt format of an uploaded model; most models have none."""
    try:
        return Path(hf_hub_download(name, PROMPT_FILE)).parent
    except (EntryNotFoundError, OSError):  # OSError: it is not in the cache, and the hub is out of reach
        return Path(name)


def generate_answer(
    loaded: LoadedModel,
    prompt: str,
    decoding: Decoding,
    *,
    seed: int,
    images: Sequence[str] = (),
    on_text: Callable[[str], object] | None = None,
) -> GeneratedText:
    """Answer a prompt. Raises UserError. Warns as `sample_answers` does.

    images: files for the model, one for each `<image>` in the prompt, or placed before it.
    on_text: called with each piece of the answer as it is made.
    """
    check_prompt(prompt)
    if images and loaded.reader is None:
        raise UserError(f"--image: {loaded.name} is a text model.", hint="Leave the image out.")
    pieces = TextPieces(loaded.tokenizer, on_text or (lambda piece: None))
    start = time.perf_counter()
    if loaded.reader is None:
        text, ids = encode_prompt(loaded.tokenizer, prompt, loaded.template)
        continue_text(loaded, ids, decoding, pieces, seed=seed)
    else:
        text, inputs = _encode_with_images(loaded.reader, loaded.tokenizer, prompt, images, loaded.template)
        torch.manual_seed(seed)
        _continue_with_images(loaded, inputs, decoding, pieces)
    seconds = time.perf_counter() - start
    return GeneratedText(prompt=text, text=pieces.text, new_tokens=len(pieces.ids), seconds=seconds)


def generate_answers(
    loaded: LoadedModel, prompts: Sequence[str], decoding: Decoding, *, seed: int
) -> Iterator[GeneratedText]:
    """Answer prompts of a text model together, and yield the answers in the order of the prompts.

    An answer does not depend on the other prompts. Its seconds count from the start of the whole call. Raises
    UserError. Warns as `sample_answers` does.
    """
    for prompt in prompts:
        check_prompt(prompt)
    encoded = [encode_prompt(loaded.tokenizer, prompt, loaded.template) for prompt in prompts]
    start = time.perf_counter()
    finished: dict[int, GeneratedText] = {}
    following = 0
    for answer in _answers_to(loaded, [ids for _, ids in encoded], decoding, seed=seed):
        seconds = time.perf_counter() - start
        finished[answer.prompt] = GeneratedText(encoded[answer.prompt][0], answer.text, len(answer.ids), seconds)
        while following in finished:
            yield finished.pop(following)
            following += 1


def continue_text(
    loaded: LoadedModel, ids: Sequence[int], decoding: Decoding, pieces: TextPieces, *, seed: int
) -> None:
    """Generate tokens after the ids of a prompt, and hand each to `pieces` as it is made. Raises UserError."""
    answers = _answers_to(loaded, [ids], decoding, seed=seed, on_tokens=lambda place, new: pieces.add(new))
    for _ in answers:
        pieces.end()


def _answers_to(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    seed: int,
    on_tokens: Callable[[int, Sequence[int]], object] | None = None,
) -> Iterator[Answer]:
    """Yield an answer to each prompt. The seed is that of each prompt, so an answer does not depend on the others."""
    check_prompt_ids(loaded.model, max(max(ids) for ids in prompts), name=loaded.name)
    request = AnswerRequest((), (), decoding.max_new_tokens, tuple(decoding.sampling.items()))
    settings = sampling_settings_of(loaded.model, request, name=loaded.name)
    yield from sample_answers(
        loaded.model,
        loaded.tokenizer,
        [Prompt(tuple(ids), seed) for ids in prompts],
        settings,
        name=loaded.name,
        on_tokens=on_tokens,
    )


@torch.no_grad()
def _continue_with_images(
    loaded: LoadedModel, inputs: dict[str, Tensor], decoding: Decoding, pieces: TextPieces
) -> None:
    model: AnyModule = loaded.model
    pad = loaded.tokenizer.pad_token_id
    eos = loaded.tokenizer.eos_token_id
    check_prompt_ids(model, int(inputs["input_ids"].max()), name=loaded.name)
    with refused_settings(loaded.name):
        model.generate(
            **{name: value.to(model.device) for name, value in inputs.items()},
            max_new_tokens=decoding.max_new_tokens,
            pad_token_id=pad if pad is not None else eos,  # transformers chooses the same, with a warning
            streamer=pieces,
            logits_processor=LogitsProcessorList([FiniteLogits(loaded.name)]),
            **decoding.sampling,
        )


class TextPieces(BaseStreamer):
    """Collect the tokens of an answer and pass its text on in pieces, which join to the text of all its tokens.

    transformers' TextStreamer decodes each line by itself, so tokenizers like Llama 2's lose the space with which a
    line begins. A piece never ends within a character: bytes that do not make one yet are decoded as U+FFFD.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], object]) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._has_prompt = False
        self.ids: list[int] = []
        self._sent = ""

    @property
    def text(self) -> str:
        return str(self._tokenizer.decode(self.ids, skip_special_tokens=True))

    def put(self, value: Tensor) -> None:
        """Take a token. `generate` passes the prompt first, which is skipped."""
        if self._has_prompt:
            self.add(value.flatten().tolist())
        self._has_prompt = True

    def add(self, ids: Sequence[int]) -> None:
        """Take the next tokens."""
        self.ids += ids
        text = self.text
        if not text.endswith("\ufffd"):
            self._send(text)

    def end(self) -> None:
        self._send(self.text)

    def _send(self, text: str) -> None:
        if len(text) > len(self._sent) and text.startswith(self._sent):
            piece = text[len(self._sent) :]
            self._sent = text
            self._on_text(piece)


def check_prompt(prompt: str) -> None:
    """Raise UserError if the prompt is empty, or holds bytes that are not UTF-8, which Python keeps as surrogates."""
    if not prompt.strip():
        raise UserError("The prompt is empty.", hint="Write a prompt, or - to read it from stdin.")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"The prompt is not UTF-8: character {error.start + 1} is a byte that no text has.",
            hint="Convert it, for example with iconv.",
        ) from error


def choose_prompt(folder: Path, *, raw: bool) -> PromptFormat:
    """Return the prompt format that is saved in `folder`, or that of a text without a template."""
    return {"prompt_template": "raw", "system_prompt": None} if raw else read_prompt(folder)


@panics_as_errors()
def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, template: PromptFormat, history: Sequence[tuple[str, str]] = ()
) -> tuple[str, list[int]]:
    """Return the prompt in its template, after the (prompt, answer) pairs of `history`, and its token ids."""
    check_prompt(prompt)
    text, has_bos = format_prompt(tokenizer, prompt, template, history)
    # A chat template writes BOS itself, and training saw one. verbose: transformers warns of a prompt beyond the
    # context, which `chat` shortens.
    input_ids = tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"]
    if not input_ids:
        where = f"{template_name(tokenizer)}: the chat template makes" if has_bos else "The tokenizer makes"
        raise UserError(f"{where} no token of this prompt.", hint="Correct it, or write --raw." if has_bos else "")
    return text, input_ids


def format_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, template: PromptFormat, history: Sequence[tuple[str, str]] = ()
) -> tuple[str, bool]:
    """Return (prompt as in training, up to the answer; whether it already has its special tokens such as BOS).

    history: (prompt, answer) of earlier turns. Texts without a template have none.
    """
    if template["prompt_template"] == "alpaca":
        answered = "".join(f"{alpaca_prompt(asked)}{said}{tokenizer.eos_token}\n\n" for asked, said in history)
        text = answered + alpaca_prompt(prompt)
        return (f"{template['system_prompt']}\n\n{text}" if template["system_prompt"] else text), False
    if not _uses_chat_template(tokenizer, template):
        return prompt, False
    return _chat_prompt(tokenizer, prompt, template, history), True


def _uses_chat_template(tokenizer: PreTrainedTokenizerBase, template: PromptFormat) -> bool:
    return template["prompt_template"] == "chat" and bool(tokenizer.chat_template)


def _chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    content: str | list[dict[str, Any]],
    template: PromptFormat,
    history: Sequence[tuple[str, str]] = (),
) -> str:
    turns: list[tuple[str, Any]] = [("system", template["system_prompt"])] if template["system_prompt"] else []
    for asked, said in history:
        turns += [("user", asked), ("assistant", said)]
    turns = [*turns, ("user", content)]
    text = _rendered_turns(tokenizer, turns, template)
    if not isinstance(content, str) or content.strip() in text:
        return text
    # a template that reads only parts renders a text as nothing
    as_parts = [(role, [{"type": "text", "text": said}]) for role, said in turns]
    try:
        of_parts = _rendered_turns(tokenizer, as_parts, template)
    except UserError:  # the template reads strings only, and changes them
        return text
    return of_parts if content.strip() in of_parts else text


def _rendered_turns(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[tuple[str, Any]], template: PromptFormat
) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    source = tokenizer.get_chat_template()
    name = template_name(tokenizer)
    try:
        own = template.get("chat_template_kwargs", {})
        variables = {**tokenizer.special_tokens_map, **own, "add_generation_prompt": True}
        return render_chat_template(source, messages, name=name, **variables)[0]
    except TemplateRefusalError as error:
        raise UserError(f"The model's chat template refuses this conversation: {error}") from error


def _encode_with_images(
    reader: ModalityReader,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    images: Sequence[str],
    template: PromptFormat,
) -> tuple[str, dict[str, Tensor]]:
    """Return (prompt with one token per image, inputs of `generate`), prepared as rows with images are for training."""
    row_files = reader.row_files(str(Path.cwd()))
    has_bos = _uses_chat_template(tokenizer, template)
    try:
        row, references = row_files.extract({"messages": [{"role": "user", "content": prompt}], "images": list(images)})
        marked = row["messages"][0]["content"]
        files = row_files.find(Conversation((Message("user", marked),)), references, "")
        text = marked
        if has_bos:
            takes_parts = reader.part_type in tokenizer.chat_template
            content = marked_parts(marked, reader.part_type) if takes_parts else MARK.sub(reader.template_text, marked)
            text = _chat_prompt(tokenizer, content, template)
        text = row_files.insert(Rendered(text, ()), files).text
    except BadRow as bad:
        raise UserError(f"--image: {bad}.", hint="Name a file for each <image> in the prompt, or write none.") from bad
    input_ids = tokenizer(text, return_tensors="pt", add_special_tokens=not has_bos)["input_ids"]
    return text, reader.prompt_inputs(input_ids, files)


@dataclass(frozen=True)
class SampleAnswers:
    """Greedy answers to fixed prompts, to follow a model while it trains. No random numbers are drawn."""

    prompts: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    template: PromptFormat

    def __call__(self, model: AnyModule) -> list[dict[str, str]]:
        """Return {prompt, answer} for each prompt."""
        encoded = [encode_prompt(self.tokenizer, prompt, self.template)[1] for prompt in self.prompts]
        requests = [AnswerRequest(tuple(ids), (), SAMPLE_TOKENS) for ids in encoded]
        answers = answer_batches(model, self.tokenizer, requests, name="that trains")
        return [{"prompt": asked, "answer": said} for asked, said in zip(self.prompts, answers, strict=True)]
