"""A model for lm-evaluation-harness: its three kinds of requests, answered in packed batches with our kernels.

This module imports lm_eval, which is an optional package: `harness.py` imports it when tasks are evaluated. Tokens,
contexts and stop texts are those of `lm_eval --model hf`.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from ligertune.data.templates.bounded_jinja import render_chat_template, template_name
from ligertune.decode.batched_answers import AnswerRequest, answer_batches
from ligertune.decode.text_scorer import TextScorer
from ligertune.errors import UserError

DEFAULT_NEW_TOKENS = 256  # of an answer whose task names no length, as in lm_eval


class HarnessModel(LM):  # type: ignore[misc]  # lm_eval has no types where it is not installed
    """A language model as lm_eval's evaluator uses it.

    name: of the model, for errors. batch_size: prompts that are answered at a time; None: by the device.
    """

    def __init__(self, scorer: TextScorer, *, name: str, batch_size: int | None = None) -> None:
        super().__init__()
        self.scorer = scorer
        self.name = name
        self._batch_size = batch_size

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy decoding gives it) of each continuation after its context."""
        return self.scorer.score([self.scorer.encode_pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-probability of each text."""
        return self.scorer.score_texts([request.args[0] for request in requests])

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the answer to each prompt, up to its stop texts."""
        asked = [self._answer_request(*request.args) for request in requests]
        scorer = self.scorer
        return answer_batches(scorer.model, scorer.tokenizer, asked, name=self.name, batch_size=self._batch_size)

    def _answer_request(self, context: str, settings: dict[str, Any]) -> AnswerRequest:
        """Return a request whose prompt has lost its first tokens, if it and the answer do not fit."""
        scorer = self.scorer
        kept = dict(normalize_gen_kwargs(settings, DEFAULT_NEW_TOKENS))
        end = scorer.tokenizer.decode(scorer.tokenizer.eos_token_id, skip_special_tokens=False)
        stop = handle_stop_sequences(kept.pop("until", None), eos=end)
        new_tokens = kept.pop("max_gen_toks")
        room = scorer.max_length - new_tokens
        if room <= 0:
            raise UserError(
                f"A task asks for {new_tokens:,} new tokens, and {self.name} reads {scorer.max_length:,} in all.",
                hint="Write a smaller max_gen_toks into the task.",
            )
        ids = scorer.encode(context)[-room:]
        return AnswerRequest(tuple(ids), tuple(stop), new_tokens, tuple(sorted(kept.items())))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the messages in the model's chat template."""
        tokenizer = self.scorer.tokenizer
        variables: dict[str, Any] = {**tokenizer.special_tokens_map, "add_generation_prompt": add_generation_prompt}
        if not add_generation_prompt:
            variables["continue_final_message"] = True
        return render_chat_template(
            tokenizer.get_chat_template(), chat_history, name=template_name(tokenizer), **variables
        )[0]

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, by which lm_eval stores requests."""
        return str(self.scorer.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template; None if it is not used."""
        return self.scorer.tokenizer.get_chat_template() if chat_template else None
