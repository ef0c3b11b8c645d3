"""A conversation with a model: history in the prompt format of training, kept within the model's context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ligertune.decode.generate import Decoding, LoadedModel, TextPieces, continue_text, encode_prompt
from ligertune.errors import UserError, plural


@dataclass
class Chat:
    """A loaded model and the turns so far.

    on_text is called with each piece of an answer, on_notice with what the user should know about it.
    """

    loaded: LoadedModel
    decoding: Decoding
    on_text: Callable[[str], object]
    on_notice: Callable[[str], object]
    history: list[tuple[str, str]] = field(default_factory=list)  # (message, answer)

    @property
    def format_note(self) -> str:
        """What the model reads, if it is not a conversation in a chat template; else an empty string."""
        if self.loaded.uses_chat_template:
            return ""
        if self.loaded.template["prompt_template"] == "alpaca":
            return "Trained on single exchanges (Alpaca): earlier ones are sent with your message; /reset forgets them."
        return "Plain text without a chat template: each message is continued as it is, without the ones before it."

    @property
    def context(self) -> int | None:
        """The number of tokens that the model can read and write; None if it has no limit."""
        return getattr(self.loaded.model.config.get_text_config(), "max_position_embeddings", None)

    def set_system(self, text: str) -> None:
        """Replace the system prompt; an empty text removes it. Raises UserError if the prompt format has none."""
        self.loaded = self.loaded.with_system(text)

    def ask(self, message: str) -> str:
        """Answer a message and remember both; end the line. KeyboardInterrupt ends the answer. Raises UserError."""
        ids, room = self._fit(message)
        pieces = TextPieces(self.loaded.tokenizer, self.on_text)
        seed = int(torch.randint(2**62, ()))
        try:
            continue_text(self.loaded, ids, replace(self.decoding, max_new_tokens=room), pieces, seed=seed)
        except KeyboardInterrupt:
            pieces.end()
        if pieces.text:
            self.history.append((message, pieces.text))
        if not pieces.text.endswith("\n"):
            self.on_text("\n")
        if len(pieces.ids) == room < self.decoding.max_new_tokens:
            self.on_notice(f"The answer ends here: the model's context of {self.context} tokens is full.")
        return pieces.text

    def _fit(self, message: str) -> tuple[list[int], int]:
        """Return (token ids of the prompt, room for the answer), after dropping the oldest turns that do not fit."""
        wanted = self.decoding.max_new_tokens
        dropped = 0
        if self.context is not None:  # at most a quarter is kept free, or a large max_new_tokens would drop all turns
            wanted = min(wanted, max(1, self.context // 4))
        while True:
            ids = encode_prompt(self.loaded.tokenizer, message, self.loaded.template, self.history)[1]
            if self.context is None or len(ids) + wanted <= self.context or not self.history:
                break
            del self.history[0]
            dropped += 1
        if dropped:
            turns = "turn" if dropped == 1 else plural(dropped, "turn")
            self.on_notice(f"The model's context of {self.context} tokens is full: dropped the first {turns}.")
        if self.context is None:
            return ids, self.decoding.max_new_tokens
        if len(ids) >= self.context:
            raise UserError(
                f"This message has {len(ids)} tokens with its prompt, and the model's context is {self.context}.",
                hint="Send a shorter one.",
            )
        return ids, min(self.decoding.max_new_tokens, self.context - len(ids))
