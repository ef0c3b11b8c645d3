"""Prompts without a chat template: Stanford Alpaca's, and plain texts that are used unchanged.

The Alpaca prompts are Stanford's, with a line break after "### Response:" as nearly all later projects write them
(without it the answer's first word would follow the colon directly). BOS is added before the text if the tokenizer
normally writes one, and EOS after the answer; both are added as ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ligertune.data.rows.conversation import BadRow, Conversation, Message
from ligertune.data.templates.control_tokens import ControlTokens, Rendered
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "last", "all"]

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str, input: str = "", introduction: str | None = None) -> str:
    """Return the text before the answer. `introduction` is a system prompt, which comes before Alpaca's own."""
    prompt = ALPACA_PROMPT_WITH_INPUT if input.strip() else ALPACA_PROMPT
    filled = prompt.format(instruction=instruction, input=input)
    return f"{introduction}\n\n{filled}" if introduction else filled


class PlainTemplate:
    """A prompt and its completion, or one text, unchanged: control tokens in it are control tokens."""

    name = "plain"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn) -> None:
        self._train_on = train_on
        self._bos, self._eos = _bos_and_eos(tokenizer)
        self._bos_text, self._eos_text = tokenizer.bos_token or "", tokenizer.eos_token

    def render(self, conversation: Conversation) -> Rendered:
        """Return prompt and completion, with BOS and EOS unless the text has its own."""
        *prompt, answer = conversation.messages
        if len(prompt) > 1 or any(turn.role != "user" for turn in prompt) or answer.calls or answer.reasoning:
            raise BadRow("several exchanges", f"{len(conversation.messages)} turns")
        rendered = self._exchange(prompt[0].content if prompt else "", answer)
        has_bos = self._bos_text and rendered.text.startswith(self._bos_text)
        has_eos = rendered.text.endswith(self._eos_text)
        return rendered._replace(bos=None if has_bos else self._bos, eos=None if has_eos else self._eos)

    def _exchange(self, prompt: str, answer: Message) -> Rendered:
        text = prompt + answer.content
        start = 0 if self._train_on == "all" else len(prompt)
        trained = ((start, len(text)),) if answer.trained or self._train_on == "all" else ()
        return Rendered(text, trained, bos=self._bos, eos=self._eos)


class AlpacaTemplate(PlainTemplate):
    """The two Stanford Alpaca prompts, with and without an input. Names of control tokens in the row are text."""

    name = "alpaca"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None, train_on: TrainOn) -> None:
        super().__init__(tokenizer, train_on)
        self._system_prompt = system_prompt
        self._control = ControlTokens(tokenizer)

    def render(self, conversation: Conversation) -> Rendered:
        """Return the filled prompt followed by the answer. Raises BadRow for more than one exchange."""
        *system, user, answer = conversation.messages
        several = len(system) > 1 or user.role != "user" or (system and system[0].role != "system")
        if several or answer.calls or answer.reasoning or conversation.tools:
            raise BadRow("several exchanges", f"{len(conversation.messages)} turns")
        introduction = system[0].content if system else self._system_prompt
        rendered = self._exchange(alpaca_prompt(user.content, user.input, introduction), answer)
        return rendered._replace(literal=self._control.found_in(rendered.text))


def _bos_and_eos(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int]:
    """Return the ids of BOS and EOS. BOS is None if the tokenizer normally writes none."""
    if tokenizer.eos_token_id is None:
        raise UserError(
            "The tokenizer has no EOS token, so a model would never learn to stop.",
            hint="Name one in model.tokenizer.eos_token.",
        )
    writes_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    return tokenizer.bos_token_id if writes_bos else None, tokenizer.eos_token_id
