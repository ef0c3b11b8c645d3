"""Fixtures of the data tests: five kinds of tokenizers, loaded once, and prepared data."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.data.row_files import write_rows
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
    """Return the quickstart's tokenizer, which needs no corpus."""
    return AutoTokenizer.from_pretrained(quickstart / "stories260K")


@pytest.fixture
def prepared(stories: PreTrainedTokenizerBase, tmp_path: Path) -> Callable[..., PreparedData]:
    """Call as prepared(rows or path, tokenizer=stories, seed=0, dataset={...}, content=..., **data options)."""

    def of(
        data, *, tokenizer=stories, seed: int = 0, dataset: dict | None = None, content="conversations", **options
    ) -> PreparedData:
        path = data if isinstance(data, Path) else write_rows(tmp_path / "d.jsonl", data)
        sets = [DatasetOptions(path=str(path), **(dataset or {}))]
        return prepare(DataOptions(datasets=sets, **options), tokenizer, seed=seed, rows=content)

    return of
