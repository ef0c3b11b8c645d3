"""Scores of answers by a model that was trained to score, which reads the conversation in its own template."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ligertune.any_types import AnyModule
from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation, Message
from ligertune.data.rows.formats import FORMATS
from ligertune.data.templates.label_masking import Encoder
from ligertune.data.templates.prompt_templates import choose_template
from ligertune.errors import UserError
from ligertune.features.sample.sample_prompts import Form, SamplePrompt
from ligertune.files.storage import PROMPT_FILE
from ligertune.models.load import hide_loading_bars
from ligertune.models.save import load_saved, read_prompt, read_saved_config, saved_spec
from ligertune.models.score_head import gives_scores, score_module
from ligertune.models.shape import base_of
from ligertune.planning.saved_model import check_can_generate, find_saved_model

if TYPE_CHECKING:
    from ligertune.planning.options import DataOptions

KEY = "sample.score_model"
_TOKENS_OF_BATCH = 16_384  # padded; an 8B model then needs about 2 GiB for its layers' activations


def score_model_name(name: str) -> str:
    """Return the folder or hub id of the model that `sample.score_model` means. Raises UserError."""
    saved = find_saved_model(name, key=KEY)
    check_can_generate(saved, key=KEY)
    return saved.name


class ScoreModel:
    """A loaded model with one score. form: of the prompts. Raises UserError for another model."""

    def __init__(self, name: str, data: DataOptions, form: Form, *, trust_remote_code: bool) -> None:
        hide_loading_bars()
        config = read_saved_config(name, saved_spec(name, trust_remote_code=trust_remote_code))
        if not gives_scores(config) or config.num_labels != 1:
            kind = f"has {config.num_labels} scores" if gives_scores(config) else "writes text"
            raise UserError(
                f"{KEY}: {name} {kind}, and one score is needed.",
                hint="Name a model that was trained on pairs to score texts.",
            )
        model: AnyModule
        model, tokenizer = load_saved(name, trust_remote_code=trust_remote_code)
        if not torch.cuda.is_available() and base_of(model).dtype == torch.float16:
            model = model.float()
        self._name = name
        self._model = model.eval()
        # a model of ours names its prompt template; another one reads the prompts as they are rendered here
        has_prompt = (Path(name) / PROMPT_FILE).is_file()
        prompt = read_prompt(Path(name)) if has_prompt else {"prompt_template": form}
        template = prompt["prompt_template"]
        changes: dict[str, Any] = {
            "prompt_template": "plain" if template == "raw" else template,
            "system_prompt": prompt.get("system_prompt"),
            "chat_template_kwargs": prompt.get("chat_template_kwargs", {}),
            "train_on": "last",
        }
        messages = next(format for format in FORMATS if format.name == "messages")
        self._template = choose_template(data.model_copy(update=changes), messages, tokenizer)
        self._encoder = Encoder(tokenizer)

    def __call__(
        self, asked: Sequence[SamplePrompt], texts: Sequence[str], progress: Callable[[float], None]
    ) -> list[float]:
        """Return the score of each answer. asked: the prompts of the answers."""
        ids = [self._ids(prompt, text) for prompt, text in zip(asked, texts, strict=True)]
        order = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
        scores = [0.0] * len(ids)
        done = 0
        while done < len(order):
            rows = max(1, _TOKENS_OF_BATCH // len(ids[order[done]]))
            chosen = order[done : done + rows]
            for place, score in zip(chosen, self._scores([ids[place] for place in chosen]).tolist(), strict=True):
                scores[place] = score
            done += len(chosen)
            progress(done / len(order))
        if not all(map(math.isfinite, scores)):
            raise UserError(f"{KEY}: the model {self._name} computes NaN: its weights are damaged.", exit_code=1)
        return scores

    def _ids(self, prompt: SamplePrompt, text: str) -> list[int]:
        """Return the tokens of a prompt with an answer, as they were in training."""
        # an empty answer is no turn of training data, and has a score nevertheless
        answer = Message("assistant", text if text.strip() else " ")
        conversation = Conversation((*prompt.messages, answer), prompt.tools)
        try:
            (encoded,) = self._encoder.encode([self._template.render(conversation)])
            if isinstance(encoded, BadRow):
                raise encoded
        except BadRow as bad:
            raise UserError(
                f"{KEY}: the prompt of {prompt.source} cannot be rendered for {self._name}: {bad}.",
                hint="Use one with the prompt template of the data.",
            ) from bad
        return [int(token) for token in encoded.input_ids]

    @torch.no_grad()
    def _scores(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the score (B,) at the last token of each row."""
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
            mask[place, : len(row)] = 1
        model = base_of(self._model)
        device = next(model.parameters()).device
        hidden = model.base_model(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        head = score_module(model)
        assert head is not None  # `gives_scores` has found its class
        found: Tensor = head(hidden[torch.arange(len(rows), device=device), last])
        return found[:, 0].float()
