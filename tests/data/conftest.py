"""Tokenizers of five kinds, loaded once, and a short way to prepare data with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ligertune.data.prepare import PreparedData, prepare
from ligertune.planning.options import DataOptions, DatasetOptions

TOKENIZERS = {
    "qwen2.5": "tokenizers/qwen2.5",  # ChatML with a default system turn, no BOS, NFC
    "mistral-7b-v0.1": "tokenizers/mistral-7b-v0.1",  # BOS in the template, a space before the answer
    "phi-3-mini": "tokenizers/phi-3-mini",  # special tokens swallow what follows; EOS after a finished conversation
    "gpt2": "tokenizers/gpt2",  # BOS is EOS
    "stories260K": "models/stories260K",  # 512 tokens: nearly every character its own
}


@pytest.fixture(scope="session")
def tokenizer_named(corpus: Path) -> Callable[[str], PreTrainedTokenizerBase]:
    return cache(lambda name: AutoTokenizer.from_pretrained(corpus / TOKENIZERS[name]))


@pytest.fixture(scope="session")
def stories(quickstart: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that is shipped: these tests need no corpus."""
    return AutoTokenizer.from_pretrained(quickstart / "stories260K")


@pytest.fixture
def prepared(stories: PreTrainedTokenizerBase) -> Callable[..., PreparedData]:
    """prepared(path, tokenizer=stories, seed=0, dataset={...}, **data section)"""

    def of(path: Path, *, tokenizer=stories, seed: int = 0, dataset: dict | None = None, **data) -> PreparedData:
        sets = [DatasetOptions(path=str(path), **(dataset or {}))]
        return prepare(DataOptions(datasets=sets, **data), tokenizer, seed=seed)

    return of
