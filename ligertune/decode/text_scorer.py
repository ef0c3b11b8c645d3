"""Log-likelihoods of texts, in packed or padded batches, for tasks that compare answers by them.

Requests are sorted by length. Those with the same tokens before their last one, such as the choices A to D after one
question, share a row. Only the positions of the continuation reach the output head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ligertune.any_types import AnyModule
from ligertune.data.batching.collate import collate, collate_packed
from ligertune.data.examples import Example
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.decode.log_probs import TargetLogProbs, keep_log_probs
from ligertune.errors import UserError, plural

DEFAULT_LENGTH = 2048  # of a model that names no longest text
# Tokens of a forward. On a GPU it takes many for full speed; on a CPU more would only take memory.
GPU_TOKENS = 16_384
CPU_TOKENS = 2_048
_UNLIMITED = 10**18  # tokenizers write more than this for a length that they do not know

TokenPair = tuple[list[int], list[int]]  # ids of a context, which has at least one, and of its continuation
Likelihood = tuple[float, bool]  # sum of log-probabilities, and whether greedy decoding gives the continuation


@dataclass(frozen=True)
class TextBatching:
    """How texts become batches: packed into one row, or padded on the right; T is a multiple of `multiple_of`."""

    packed: bool
    multiple_of: int
    pad_token_id: int
    tokens_per_pass: int | None = None  # None: by the device


@dataclass(frozen=True)
class _Row:
    """One input (T,) and the continuations at its end: (index of the request, tokens)."""

    ids: tuple[int, ...]
    asked: list[tuple[int, list[int]]]


class TextScorer:
    """A model, its tokenizer, and how texts are batched. Texts are tokenized as `lm_eval --model hf` does."""

    def __init__(self, model: AnyModule, tokenizer: PreTrainedTokenizerBase, batching: TextBatching) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batching = batching
        self.max_length = longest_input(model.config, tokenizer)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def prefix_token(self) -> int:
        """Id of the token in front of a text without a context: BOS, or EOS where there is none."""
        bos = self.tokenizer.bos_token_id
        prefix = self.tokenizer.eos_token_id if bos is None else bos
        if prefix is None:
            raise UserError("The tokenizer has no BOS and no EOS token, after which a text without context is scored.")
        return int(prefix)

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """Return the ids of a text. None: with special tokens, unless the text begins with one itself."""
        if add_special_tokens is None and text.startswith(str(self.tokenizer.decode(self.prefix_token))):
            add_special_tokens = False
        kept = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(text, **kept))

    def encode_pair(self, context: str, continuation: str) -> TokenPair:
        """Return the ids of a context and of the text after it. Spaces at the end of the context move behind it."""
        if not context:
            ids = self.encode(continuation, add_special_tokens=False)
            if ids[:1] == [self.prefix_token]:
                return ids[:1], ids[1:]
            return [self.prefix_token], ids
        kept = context.rstrip()
        before = self.encode(kept)
        whole = self.encode(kept + context[len(kept) :] + continuation)
        return before, whole[len(before) :]

    def score(
        self, pairs: Sequence[TokenPair], progress: Callable[[float], None] = lambda share: None
    ) -> list[Likelihood]:
        """Return the log-likelihood of each continuation after its context. The results are in the given order.

        A text longer than the model's `max_length` loses its first tokens. Raises UserError for a continuation that is
        empty or longer than that.
        """
        rows = self._rows(pairs)
        found = np.zeros((2, len(pairs)))
        was_training = self.model.training
        self.model.eval()
        done = 0
        for batch in self._batches(rows):
            asked = [one for row in batch for one in row.asked]
            values = self._score_rows(batch).cpu().numpy()
            found[:, [index for index, _ in asked]] = values[0], values[1] == values[2]
            done += len(batch)
            progress(done / len(rows))
        self.model.train(was_training)
        return [(float(total), bool(greedy)) for total, greedy in found.T]

    def score_texts(self, texts: Sequence[str], progress: Callable[[float], None] = lambda share: None) -> list[float]:
        """Return the log-likelihood of whole texts after the prefix token.

        A text longer than `max_length` is scored in windows of that length, each token once.
        """
        windows = [list(rolling_windows(self.encode(text), self.prefix_token, self.max_length)) for text in texts]
        scores = iter(self.score([window for of_text in windows for window in of_text], progress))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def _rows(self, pairs: Sequence[TokenPair]) -> list[_Row]:
        """Return the inputs, longest first; requests with the same input share one."""
        rows: dict[tuple[int, ...], _Row] = {}
        for index, (context, continuation) in enumerate(pairs):
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"A continuation has {plural(len(continuation), 'token')}, and the model scores 1 to "
                    f"{self.max_length:,}.",
                    hint="Correct the task, or choose a model for longer texts.",
                )
            ids = tuple((context + continuation)[-(self.max_length + 1) :][:-1])
            rows.setdefault(ids, _Row(ids, [])).asked.append((index, continuation))
        return sorted(rows.values(), key=lambda row: -len(row.ids))

    def _batches(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
        """Yield the rows of each forward: as many as have room among its tokens, padding included."""
        room = self.batching.tokens_per_pass or (GPU_TOKENS if self.device.type == "cuda" else CPU_TOKENS)
        batch: list[_Row] = []
        used = 0
        for row in rows:
            taken = len(row.ids) if self.batching.packed or not batch else len(batch[0].ids)
            if batch and used + taken > room:
                yield batch
                batch = []
                used = 0
                taken = len(row.ids)
            batch.append(row)
            used += taken
        if batch:
            yield batch

    def _score_rows(self, rows: Sequence[_Row]) -> Tensor:
        """Return the sums of `TargetLogProbs` for each continuation of these rows."""
        examples = [_example(row.ids) for row in rows]
        pad = self.batching.pad_token_id
        multiple_of = self.batching.multiple_of
        batch: dict[str, Any]
        if self.batching.packed:
            batch = collate_packed(examples, pad_token_id=pad, pad_to_multiple_of=multiple_of)
            ends = np.cumsum([len(row.ids) for row in rows])
        else:
            batch = collate(examples, pad_token_id=pad, pad_to_multiple_of=multiple_of)
            width = batch["input_ids"].shape[1]
            ends = np.array([number * width + len(row.ids) for number, row in enumerate(rows)])
        places: list[int] = []
        targets: list[int] = []
        part_of: list[int] = []
        parts = 0
        for row, end in zip(rows, ends.tolist(), strict=True):
            for _, continuation in row.asked:
                places += range(end - len(continuation), end)
                targets += continuation
                part_of += [parts] * len(continuation)
                parts += 1
        on_device = {
            name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in batch.items()
        }
        kept = TargetLogProbs(*(torch.tensor(values, device=self.device) for values in (places, targets)))
        keep_log_probs(self.model, on_device, kept)
        return kept.sums(torch.tensor(part_of, device=self.device), parts)


def _example(ids: Sequence[int]) -> Example:
    array = np.array(ids, dtype=np.int32)
    return Example(array, np.full_like(array, IGNORE_INDEX), "")


def rolling_windows(ids: Sequence[int], prefix_token: int, max_length: int) -> Iterator[TokenPair]:
    """Yield (context, continuation) of the windows of a text, so that each token is predicted once.

    The first window is predicted after the prefix token. The last one may begin with tokens that are predicted already.
    """
    tokens = [prefix_token, *ids]
    predicted = 0
    while predicted < len(ids):
        end = min(predicted + max_length, len(ids))
        window = tokens[max(end - max_length, 0) : end + 1]
        context = len(window) - (end - predicted)
        yield window[:context], window[context:]
        predicted = end


def longest_input(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens that a model reads, as `lm_eval --model hf` finds it."""
    text_config = config.get_text_config()
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        found = getattr(text_config, name, None)
        if found is not None:
            return int(found)
    length = tokenizer.model_max_length
    return DEFAULT_LENGTH if length is None or length > _UNLIMITED else int(length)


def batching_of(tokenizer: PreTrainedTokenizerBase, *, packed: bool, multiple_of: int) -> TextBatching:
    """Return how the texts of a model are batched. multiple_of: of rows, which the model's attention needs."""
    pad = tokenizer.pad_token_id
    return TextBatching(packed, multiple_of, 0 if pad is None else int(pad))
