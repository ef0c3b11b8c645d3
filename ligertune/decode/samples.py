"""Answers to a few prompts while a model trains, so that one sees what the loss does not say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ligertune.decode.generate import in_template
from ligertune.models.compile import run_eagerly

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEW_TOKENS = 64


def answers_to(
    prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, how: dict, *, pad_token_id: int
) -> Callable[[PreTrainedModel], list[dict[str, str]]]:
    """A function of the model: each prompt, in the template of training, with its greedy answer. It draws no numbers.

    how: prompt_template and system_prompt, as `read_prompt` gives them.
    """

    @torch.no_grad()
    def answer(model: PreTrainedModel) -> list[dict[str, str]]:
        was_training, found = model.training, []
        model.eval()
        for prompt in prompts:
            text, writes_special = in_template(tokenizer, prompt, how)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=not writes_special)["input_ids"]
            ids = ids.to(next(model.parameters()).device)
            with run_eagerly():
                output = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    pad_token_id=pad_token_id,
                )
            said = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            found.append({"prompt": prompt, "answer": said})
        model.train(was_training)
        return found

    return answer
