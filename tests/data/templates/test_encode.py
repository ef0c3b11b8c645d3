"""Encoder: looking up the ends of a span gives the same labels as the offsets of all tokens."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from ligertune.data.templates.control_tokens import Rendered
from ligertune.data.templates.label_masking import IGNORE_INDEX, Encoder, mark_tokens, mark_tokens_by_offsets

# where token bounds are not character bounds: bytes, combining marks, joined emoji, line breaks, spaces
AWKWARD = "a é e\u0301 q\u0307\u0323 你好 👩‍👧 \n\n  \t x\u200b 12 don't <b> ﬁ \u00a0end "


def spans_of(text: str, rng: random.Random) -> tuple[tuple[int, int], ...]:
    cuts = sorted(rng.sample(range(len(text) + 1), k=min(6, len(text))))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


@pytest.mark.parametrize("name", ["qwen2.5", "mistral-7b-v0.1", "phi-3-mini", "gpt2", "stories260K"])
@pytest.mark.corpus
def test_span_ends_and_all_offsets_mark_the_same_tokens(tokenizer_named, name):
    tokenizer, rng = tokenizer_named(name), random.Random(name)
    texts = ["".join(rng.choices(AWKWARD, k=rng.randint(1, 40))) for _ in range(300)] + [AWKWARD * 3]
    for text in texts:
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        rendered = Rendered(text, spans_of(text, rng))
        quick, whole = mark_tokens(rendered, encoding), mark_tokens_by_offsets(rendered, encoding.ids, encoding.offsets)
        n_tokens = len(encoding.ids)
        assert np.array_equal(covered(quick.trained, n_tokens), covered(whole.trained, n_tokens)), repr(text)
        assert quick.straddling == whole.straddling, repr(text)


def covered(ranges: list[tuple[int, int]], n_tokens: int) -> np.ndarray:
    inside = np.zeros(n_tokens, dtype=bool)
    for start, stop in ranges:
        inside[start:stop] = True
    return inside


def test_a_batch_is_labelled_text_by_text(stories):
    rendered = [Rendered("one two", ((3, 7),), bos=1, eos=2), Rendered("", (), eos=2), Rendered("three", ((0, 5),))]
    first, empty, last = Encoder(stories).encode(rendered)
    assert stories.decode(first.labels[first.labels != IGNORE_INDEX]).split() == ["two</s>"]
    assert (first.input_ids[0], first.input_ids[-1], first.labels[-1], first.trained[-1]) == (1, 2, 2, 2)
    assert not (first.labels[:3] >= 0).any()
    assert (empty.input_ids.tolist(), empty.labels.tolist(), len(empty.trained)) == ([2], [-100], 0)
    assert last.labels[0] == IGNORE_INDEX and np.array_equal(last.labels[1:], last.input_ids[1:])


def test_a_cut_does_not_change_the_whole(stories):
    (whole,) = Encoder(stories).encode([Rendered("say a few words", ((3, 15),))])
    before = whole.labels.copy()
    part = whole.cut(5, 9)
    assert part.labels[0] == IGNORE_INDEX and len(part.trained) == 3
    assert np.array_equal(whole.labels, before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_texts_are_not_cached_by_the_tokenizer(stories):
    """A tokenizer without a pre-tokenizer would cache thousands of whole texts: 46 MiB here."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefghij klmnop", k=120)) for _ in range(9000)]

    def resident(read: list[str]) -> float:
        list(Encoder(stories).encode([Rendered(text, ((0, len(text)),)) for text in read]))
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4 / 1024  # MiB

    before = resident(texts[:1000])
    assert resident(texts[1000:]) - before < 24


def test_eos_is_trained_only_after_an_answer(stories):
    """BOS is 1 and EOS is 2 here."""
    for trained, ends in (((3, 6),), [2]), ((), [IGNORE_INDEX]):
        (encoded,) = Encoder(stories).encode([Rendered("ab cde", trained, bos=1, eos=2)])
        assert (encoded.input_ids[0], encoded.input_ids[-1]) == (1, 2)
        assert encoded.labels[-1:].tolist() == ends and encoded.labels[0] == IGNORE_INDEX
