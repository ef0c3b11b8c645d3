"""Continuous batching: the number of slots is fixed, and a slot takes the next answer when its answer is finished.

The keys, values and states of a prompt are computed once, and copied into the slots of its answers. A step has static
shapes and does not wait for the device, so on a GPU it is recorded as a CUDA graph.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache

from ligertune.any_types import AnyModule
from ligertune.decode.answers.answer_ends import StopTexts, nan_error
from ligertune.decode.answers.answer_task import Answer, AnswerTask, SamplingNote
from ligertune.decode.answers.slot_attention import NoSlotsError
from ligertune.decode.answers.slot_cache import (
    SlotCache,
    bytes_per_slot,
    cache_keyword,
    has_recurrent_states,
    prefix_cache,
)
from ligertune.decode.answers.token_choice import answer_key, choose_tokens, penalised
from ligertune.errors import message_of
from ligertune.hardware import available_memory, total_memory
from ligertune.models.compile import run_eagerly

CPU_SLOTS = 32
MOST_SLOTS = 1024
SHARE_OF_FREE = 0.6  # of the free memory, for slots; the rest is for prefixes, logits and activations
_CUDA_STEPS = 16  # between two looks at the slots: a look waits for the GPU, and a finished slot waits for a look
_WATCHED_STEPS = 4  # the same if somebody reads the answer while it grows
_PREFIX_TOKENS = 16_384  # of the prompts that are read in one forward, padding included
# Prompts that are read at a time, at least: slots become empty one by one, and a forward over one prompt takes a GPU as
# long as one over many.
_PROMPTS_AHEAD = 16
# cuDNN's attention, which torch prefers on Hopper, makes a plan for every new shape of prompts: 90 ms each.
_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PROBE = (5, 3)  # tokens of the texts that check the slots of a model
# Logits by slots may differ from those of a plain forward by this share of the largest logit: rounding in 32 and in 16
# bits, with room. A wrong mask or position changes them by 10 % in most models.
_PROBE_TOLERANCE = {4: 1e-3, 2: 4e-2}

Finished = Callable[[], Answer]  # decodes the text of a finished answer


@torch.no_grad()
def probe_slots(task: AnswerTask) -> tuple[Cache | None, str]:
    """Compare logits by slots with those of a plain forward, for two short texts from the first prompt.

    Returns (a cache of prompts, for its shapes; "") or (None; why the model cannot be answered slot by slot). Raises
    NoSlotsError if no attention would help.
    """
    model: AnyModule = task.model
    device = task.device
    ids = task.prompts[0].ids
    texts = [[ids[index % len(ids)] for index in range(length)] for length in _PROBE]
    try:
        with run_eagerly():
            like = _read_prefixes(task, [text[:-1] for text in texts[:1]])
            positions = torch.zeros(len(texts), dtype=torch.long, device=device)
            slots = SlotCache(task.base, like, capacity=max(_PROBE) + 1, positions=positions)
            for slot, text in enumerate(texts):
                slots.fill(_read_prefixes(task, [text[:-1]]), [0], [slot])
                positions[slot] = len(text) - 1
            last = torch.tensor([text[-1:] for text in texts], device=device)
            found = model(input_ids=last, position_ids=positions[:, None], **slots.inputs()).logits[:, -1]
            plain = [model(input_ids=torch.tensor([text], device=device), use_cache=False) for text in texts]
            expected = torch.cat([one.logits[:, -1] for one in plain])
    except (NoSlotsError, torch.OutOfMemoryError):
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return None, f"its forward refuses a cache of slots ({type(error).__name__}: {message_of(error)})"
    difference = (found - expected).abs().nan_to_num(0).max()  # the first step reports NaN
    tolerance = _PROBE_TOLERANCE[min(expected.itemsize, 4)]
    if difference > tolerance * expected.abs().nan_to_num(0).max():
        return None, "its logits differ with a cache of slots"
    return like, ""


def _read_prefixes(task: AnswerTask, rows: Sequence[Sequence[int]]) -> Cache:
    """Return the cache of some texts, padded on the right."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, text in enumerate(rows):
        ids[row, : len(text)] = torch.tensor(text)
    cache = prefix_cache(task.base)
    keywords: dict[str, Any] = {cache_keyword(task.base): cache, "use_cache": True, "logits_to_keep": 1}
    task.model(input_ids=ids.to(task.device), **keywords)
    return cache


def answers_by_slots(task: AnswerTask, like: Cache) -> Iterator[Answer]:
    """Yield answers when they are finished. like: from `probe_slots`."""
    for places in same_sized_slots(task, like):
        yield from _answers(SlotEngine(task, like, places))


def _answers(engine: SlotEngine) -> Iterator[Answer]:
    finished: list[Finished] = []
    while engine.is_busy:
        with torch.no_grad(), run_eagerly(), sdpa_kernel(_SDPA):
            engine.refill()
            engine.run_steps()
        # a GPU computes these steps while texts are decoded, and while the caller has the answers
        yield from (answer() for answer in finished)
        finished = engine.take_finished()
    yield from (answer() for answer in finished)


@dataclass(frozen=True)
class _Waiting:
    """An answer whose prompt has been read: its row of `prefix`, which is None for prompts of one token."""

    place: int
    number: int
    prefix: Cache | None
    row: int


class SlotEngine:
    """The state of S slots: on the host the answers that they hold, on the device tensors of S rows."""

    def __init__(self, task: AnswerTask, like: Cache, places: Sequence[int]) -> None:
        """places: of the prompts that are answered, longest first."""
        device = task.device
        most_tokens = task.settings.max_new_tokens
        capacity = task.most_tokens(places[0])
        n_answers = len(places) * task.answers_each
        slots = min(_wanted_slots(task, n_answers), _slots_in_memory(task, bytes_per_slot(like, capacity)))
        self.task = task
        self.stops = StopTexts(task.tokenizer, task.settings.stop)
        steps = _CUDA_STEPS if task.on_tokens is None else _WATCHED_STEPS
        self.steps = min(steps, most_tokens) if device.type == "cuda" else 1
        self.reads_equal_lengths = has_recurrent_states(like)
        self.graph: torch.cuda.CUDAGraph | None = None
        # the collectives of sharded weights wait for the other ranks
        is_sharded = any(isinstance(parameter, DTensor) for parameter in task.model.parameters())
        self.can_record = device.type == "cuda" and not is_sharded

        self.unread = deque(places)
        self.waiting: deque[_Waiting] = deque()
        self.growing: list[_Waiting | None] = [None] * slots
        self.checked = [0] * slots  # tokens in which stop texts have been looked for
        self.shown = [0] * slots  # tokens that on_tokens has had

        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)  # that the next step reads
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)  # of these tokens
        self.places = torch.zeros(slots, dtype=torch.int32, device=device)  # tokens that the answer has
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.has_nan = torch.zeros(slots, dtype=torch.bool, device=device)
        self.keys = torch.zeros(slots, 2, dtype=torch.int32, device=device)
        self.end_tokens = torch.tensor(task.end_tokens or (-1,), device=device)
        # (S, C): the tokens of each text up to the one that the next step reads; behind them its first token
        self.texts: Tensor | None = None
        if task.settings.repetition_penalty != 1:
            self.texts = torch.zeros(slots, capacity, dtype=torch.long, device=device)
        # of the answers; a slot that waits writes to the column behind its answer
        self.answer_ids = torch.zeros(slots, most_tokens + 1, dtype=torch.long, device=device)
        self.answer_log_probs = torch.zeros(slots, most_tokens + 1, device=device)
        self.cache = SlotCache(task.base, like, capacity=capacity, positions=self.positions)

    @property
    def is_busy(self) -> bool:
        return bool(self.unread or self.waiting or any(self.growing))

    def refill(self) -> None:
        """Give each empty slot the next answer."""
        empty = [slot for slot, answer in enumerate(self.growing) if answer is None]
        while empty and (self.waiting or self.unread):
            if not self.waiting:
                self._read_prompts(len(empty))
            prefix = self.waiting[0].prefix
            taken: list[_Waiting] = []
            while self.waiting and len(taken) < len(empty) and self.waiting[0].prefix is prefix:
                taken.append(self.waiting.popleft())
            self._start(taken, empty[: len(taken)])
            empty = empty[len(taken) :]

    def _read_prompts(self, n_empty: int) -> None:
        """Read prompts for `n_empty` slots and more in one forward, without their last tokens, which a step reads."""
        prompts = self.task.prompts
        each = self.task.answers_each
        longest = len(prompts[self.unread[0]].ids)
        wanted = max(-(-n_empty // each), _PROMPTS_AHEAD)
        most = max(1, min(wanted, _PREFIX_TOKENS // longest))
        places: list[int] = []
        while self.unread and len(places) < most:
            if self.reads_equal_lengths and len(prompts[self.unread[0]].ids) != longest:
                break  # padding would change recurrent states
            places.append(self.unread.popleft())
        rows = [prompts[place].ids[:-1] for place in places]
        prefix = _read_prefixes(self.task, rows) if longest > 1 else None
        for row, place in enumerate(places):
            self.waiting += [_Waiting(place, number, prefix, row) for number in range(each)]

    def _start(self, answers: Sequence[_Waiting], slots: Sequence[int]) -> None:
        device = self.task.device
        prompts = [self.task.prompts[answer.place] for answer in answers]
        keys = [answer_key(prompt.seed, answer.number) for prompt, answer in zip(prompts, answers, strict=True)]
        self.cache.fill(answers[0].prefix, [answer.row for answer in answers], slots)
        where = torch.tensor(slots, device=device)
        self.tokens[where] = torch.tensor([prompt.ids[-1] for prompt in prompts], device=device)
        self.positions[where] = torch.tensor([len(prompt.ids) - 1 for prompt in prompts], device=device)
        self.keys[where] = torch.tensor(keys, dtype=torch.int32, device=device)
        self.places[where] = 0
        if self.texts is not None:
            capacity = self.texts.shape[1]
            texts = [[*prompt.ids, *[prompt.ids[0]] * (capacity - len(prompt.ids))] for prompt in prompts]
            self.texts[where] = torch.tensor(texts, device=device)
        self.active[where] = True
        for slot, answer in zip(slots, answers, strict=True):
            self.growing[slot] = answer
            self.checked[slot] = 0
            self.shown[slot] = 0

    def run_steps(self) -> None:
        """Add up to `steps` tokens to each answer. The first steps run without a graph, which compiles kernels."""
        for _ in range(self.steps):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()
        if self.graph is None and self.can_record:
            self._record()

    def _step(self) -> None:
        """Add one token to each active slot. The other slots compute too, and their results are not used."""
        task = self.task
        inputs = {"input_ids": self.tokens[:, None], "position_ids": self.positions[:, None], **self.cache.inputs()}
        logits = task.model(**inputs).logits[:, -1]
        if self.texts is not None:
            self.texts.scatter_(1, self.positions[:, None], self.tokens[:, None])
            logits = penalised(logits, self.texts, task.settings.repetition_penalty)
        chosen, log_probs = choose_tokens(logits, self.keys, self.places, task.settings.filters)
        place = self.places.long()[:, None]
        self.answer_ids.scatter_(1, place, chosen[:, None])
        self.answer_log_probs.scatter_(1, place, log_probs[:, None])
        self.has_nan.logical_or_(log_probs.isnan() & self.active)
        self.places += self.active
        ended = (chosen[:, None] == self.end_tokens).any(1) | (self.places >= task.settings.max_new_tokens)
        self.active &= ~ended
        self.tokens.copy_(chosen)
        # a slot without an answer writes to its first column, and attends to no other
        self.positions.copy_(torch.where(self.active, self.positions + 1, 0))

    def _record(self) -> None:
        """Record a step as a CUDA graph. Warns of a forward that waits for the GPU, which cannot be recorded."""
        self.can_record = False
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.task.device)
        try:
            with torch.cuda.device(self.task.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # if the recording cannot end, torch stays on its stream
            with torch.cuda.graph(torch.cuda.CUDAGraph()):  # torch's generator still expects the end of a recording
                torch.zeros((), device=self.task.device)
            warnings.warn(f"answers are made without a CUDA graph: {message_of(error)}", SamplingNote, stacklevel=2)
            return
        self.graph = graph

    def take_finished(self) -> list[Finished]:
        """Return the answers that have ended in the last steps, and empty their slots. Waits for the steps."""
        active, places, has_nan = torch.stack([self.active, self.places, self.has_nan]).tolist()
        if any(has_nan):
            raise nan_error(self.task.name)
        lengths = self._stopped(places) if self.stops.texts else {}
        self._show_tokens(places, lengths)
        done = [slot for slot, answer in enumerate(self.growing) if answer and (slot in lengths or not active[slot])]
        if not done:
            return []
        where = torch.tensor(done, device=self.task.device)
        ids = self.answer_ids[where].tolist()
        log_probs = self.answer_log_probs[where].tolist()
        self.active[where] = False
        self.positions[where] = 0
        found: list[Finished] = []
        for slot, slot_ids, slot_log_probs in zip(done, ids, log_probs, strict=True):
            answer = self.growing[slot]
            assert answer is not None
            n = lengths.get(slot, places[slot])
            self.growing[slot] = None
            has_stop_text = slot in lengths
            answer_of = partial(self.task.answer, answer.place, answer.number, has_stop_text=has_stop_text)
            found.append(partial(answer_of, slot_ids[:n], slot_log_probs[:n]))
        return found

    def _show_tokens(self, places: Sequence[int], lengths: Mapping[int, int]) -> None:
        """Pass the tokens of the last steps on. lengths: of answers that have ended with a stop text, by slot."""
        if self.task.on_tokens is None:
            return
        for slot, answer in enumerate(self.growing):
            n = lengths.get(slot, places[slot])
            if answer is not None and n > self.shown[slot]:
                self.task.on_tokens(answer.place, self.answer_ids[slot, self.shown[slot] : n].tolist())
                self.shown[slot] = n

    def _stopped(self, places: Sequence[int]) -> dict[int, int]:
        """Return the number of tokens of each answer that holds a stop text, by slot."""
        ids = self.answer_ids.tolist()
        found: dict[int, int] = {}
        for slot, answer in enumerate(self.growing):
            if answer is not None:
                length = self.stops.length(ids[slot][: places[slot]], places[slot] - self.checked[slot])
                self.checked[slot] = places[slot]
                if length is not None:
                    found[slot] = length
        return found


def same_sized_slots(task: AnswerTask, like: Cache) -> list[list[int]]:
    """Return the places of the prompts, longest first, in groups whose slots have one size.

    Those are all prompts, unless memory limits the number of slots: then a long prompt would leave few slots for all
    others, and slots are at most twice as large as an answer needs.
    """
    places = task.longest_first()
    in_memory = _slots_in_memory(task, bytes_per_slot(like, task.most_tokens(places[0])))
    if in_memory >= _wanted_slots(task, len(places) * task.answers_each):
        return [places]
    groups: list[list[int]] = []
    for place in places:
        if not groups or 2 * task.most_tokens(place) < task.most_tokens(groups[-1][0]):
            groups.append([])
        groups[-1].append(place)
    return groups


def has_room(task: AnswerTask, like: Cache) -> bool:
    """Return whether memory has room for a slot of the longest prompt. like: from `probe_slots`."""
    longest = task.longest_first()[0]
    return bytes_per_slot(like, task.most_tokens(longest)) <= _free_bytes(task.device)


def _wanted_slots(task: AnswerTask, n_answers: int) -> int:
    device = task.device
    most = MOST_SLOTS if device.type == "cuda" else CPU_SLOTS
    return min(task.batch_size or most, n_answers)


def _slots_in_memory(task: AnswerTask, slot_bytes: int) -> int:
    """Return how many slots fit, at least one. A batch size that the caller has chosen is not doubted."""
    return task.batch_size or max(1, int(SHARE_OF_FREE * _free_bytes(task.device)) // slot_bytes)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return available_memory() or total_memory()
