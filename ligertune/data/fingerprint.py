"""What the examples of a data set depend on, as one hash: the cache's key.

The bytes of the files, the names under which reports show them, the data set's and the section's keys, the tokenizer,
the template, this package's own code and the versions of what it calls. Anything else that changed them would be a bug.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.data.rows.sources import find_files, hub_fingerprint, shown_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DataOptions, DatasetOptions
    from ligertune.vision.reader import ImageReader

# keys of the section that only choose among examples, or how they are made and put together
_AFTERWARDS = {"datasets", "eval_datasets", "val_split", "packing", "padding_free", "num_proc", "cache", "streaming"}
_BESIDE = {"weight"}  # the same of a data set
_VERSIONS = ("transformers", "tokenizers", "jinja2", "numpy")
_READ_AT_ONCE = 1 << 20


def data_key(
    spec: DatasetOptions, data: DataOptions, tokenizer: PreTrainedTokenizerBase, images: ImageReader | None = None
) -> str:
    """SHA-256 over everything above; a data set on the hub stands for itself under the name `datasets` gives it."""
    files = find_files(spec.path)
    template = _template(data, tokenizer)
    parts = {
        "files": [(shown_path(file), _hash_of(file)) for file in files] or hub_fingerprint(spec),
        "path": shown_path(Path(spec.path)),
        "set": _values(spec, without=_BESIDE),
        "section": _values(data, without=_AFTERWARDS),
        "template": template,
        "today": str(datetime.date.today()) if "strftime_now" in str(template) else None,
        "tokenizer": _tokenizer(tokenizer),
        "images": images.identity() if images else None,
        "code": _own_code(),
        "versions": {name: version(name) for name in _VERSIONS},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _values(options: DatasetOptions | DataOptions, *, without: set[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in without}


def _hash_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while part := content.read(_READ_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()


def _template(data: DataOptions, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The chat template, and the file that `data.prompt_template` names if it is one."""
    file = Path(data.prompt_template)
    return [tokenizer.chat_template, file.read_bytes().decode("utf-8", "replace") if file.is_file() else None]


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    tokenizer("", add_special_tokens=False)  # sets the backend to neither pad nor cut: both are part of its text
    whole = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    return [type(tokenizer).__name__, whole, tokenizer.special_tokens_map, tokenizer.split_special_tokens]


@cache
def _own_code() -> str:
    digest = hashlib.sha256()
    for package in ("data", "vision"):
        for file in sorted((Path(__file__).parents[1] / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
