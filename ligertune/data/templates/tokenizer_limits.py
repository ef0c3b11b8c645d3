"""Limits on a tokenizer that anyone may have made: how far it expands a text, and how long its expressions take.

The library `tokenizers` runs in this process, without limits: it takes all memory for replacements of replacements, and
panics where an expression backtracks too often.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.data.templates.words import WORD_PATTERNS
from ligertune.files.model_files import ModelOrigin, loading, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# Published tokenizers replace a character by one or a few, once or twice, and add a handful of tokens to a text.
MAX_GROWTH = 256
MAX_STEPS = 100  # of all parts
MAX_ADDED = 1000  # characters or tokens that a step adds to a text
MAX_PIECE = 100  # characters that replace one in a compiled table; the longest of Unicode's NFKC has 18

PROBE_SECONDS = 5  # of processor time
PROBE_BYTES = 1 << 30  # of memory beyond this process's
PROBE_WAIT = 60  # seconds until the probe is given up: other processes may use the cores
PROBE_CHARACTERS = 2000  # backtracking that grows with the third power or faster does not end on them
_UNITS = ("a", "A", "1", " ", "\n", "-", "'", "_", "\xe9", "\u4f60", "a ", "a1", "aA", " \n", "a-", "a'", ". ", "<a>")
MAX_SIGNS = 40  # of the expressions, which are tried, too
_BREAKS = ("", "!", "\x00", "\n")  # what ends a repetition


def check_tokenizer_file(path: Path, origin: ModelOrigin) -> None:
    """Raise UserError for a tokenizer.json that expands a text without bound. It is not loaded."""
    if path.is_file():
        _check_parts(read_json(path, origin), path, origin)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, origin: ModelOrigin) -> None:
    """Raise UserError for a loaded tokenizer that expands a text without bound, or whose expressions do not end.

    The expressions are tried in a fork of this process: nothing else ends a search of `tokenizers`. Without an
    expression, or with published ones only, there is no fork.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # one in Python, without tokenizer.json
        return
    values = {}
    for part in PARTS:
        found = getattr(backend, part)
        values[part] = None if found is None else json.loads(found.__getstate__())
    steps = _check_parts(values, f"the tokenizer of {name}", origin)
    expressions = {pattern for step in steps if (pattern := _expression(step)) is not None}
    if expressions <= set(WORD_PATTERNS) or sys.platform != "linux":
        return
    signs = sorted({sign for pattern in expressions for sign in pattern} - {"\n"})[:MAX_SIGNS]
    if not _ends_in_time(backend, _probes(signs)):
        shown = min(expressions - set(WORD_PATTERNS), key=len)
        raise origin.error(
            f"the tokenizer of {name} takes more than {PROBE_SECONDS} s or {PROBE_BYTES >> 30} GiB for"
            f" {PROBE_CHARACTERS:,} characters, or fails. It contains the expression {shown[:80]!r}.",
            hint="Use the tokenizer of the model's publisher.",
        )


def _check_parts(values: dict[str, Any], where: object, origin: ModelOrigin) -> list[dict[str, Any]]:
    """Return the steps of all parts. Raises UserError."""
    with loading(origin, f"{where} is not a tokenizer"):
        steps = []
        for part in PARTS:
            growth = 1.0
            for step in _steps(values.get(part)):
                steps.append(step)
                growth *= _growth(step)
                if growth > MAX_GROWTH or len(steps) > MAX_STEPS or _added(step) > MAX_ADDED:
                    raise origin.error(
                        f"{where}: {part} makes a text more than {MAX_GROWTH} times as long, or has more than"
                        f" {MAX_STEPS} steps.",
                        hint="Use the tokenizer of the model's publisher.",
                    )
    return steps


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the single steps of a part: those of sequences within sequences."""
    if not isinstance(part, dict):
        return
    inner = [part[key] for key in ("normalizers", "pretokenizers", "processors", "decoders") if key in part]
    if not inner:
        yield part
    for steps in inner:
        for step in steps:
            yield from _steps(step)


def _growth(step: dict[str, Any]) -> float:
    """Return by how much a step lengthens a text at most; 1 for steps that do not, or by Unicode's tables only."""
    if step.get("type") == "Precompiled":
        return 1.0 if _longest_piece(step) <= MAX_PIECE else float("inf")
    if step.get("type") != "Replace":
        return 1.0
    replaced = step["pattern"].get("String")
    if replaced:
        return max(1.0, len(step["content"]) / len(replaced))
    return 1.0 + len(step["content"])  # an expression can match nothing, between any two characters


def _longest_piece(step: dict[str, Any]) -> int:
    """Return the longest text of a compiled table of SentencePiece: 4 bytes of size, a trie, texts that end with 0."""
    table = base64.b64decode(step["precompiled_charsmap"])
    pieces = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(len(piece.decode("utf-8", "replace")) for piece in pieces)


def _added(step: dict[str, Any]) -> int:
    """Return what a step adds to a text: characters in front of it, or tokens and copies of it around it."""
    templates = [step[key] for key in ("single", "pair") if isinstance(step.get(key), list)]
    ids = [token["ids"] for token in (step.get("special_tokens") or {}).values()] if templates else []
    copies = [sum("Sequence" in piece for piece in template) for template in templates]
    many = MAX_ADDED + 1 if any(number > 2 for number in copies) else 0
    return max(many, len(step.get("prepend") or ""), *map(len, templates), *map(len, ids), 0)


def _expression(step: dict[str, Any]) -> str | None:
    pattern = step.get("pattern")
    return pattern.get("Regex") if isinstance(pattern, dict) else None


def _probes(signs: Sequence[str]) -> list[str]:
    """Return texts of repetitions. An expression is not searched in a text without the signs that it requires."""
    letters = [sign for sign in signs if sign.isalnum() and sign not in _UNITS]
    return [
        unit * (PROBE_CHARACTERS // len(unit)) + ending + "".join(signs if ending else ())
        for unit in (*_UNITS, *letters)
        for ending in _BREAKS
    ]


def _ends_in_time(backend: Tokenizer, texts: Sequence[str]) -> bool:
    """Try the tokenizer on texts that expressions backtrack on, in a fork with limits. Return whether it succeeded."""
    child = os.fork()
    if not child:
        _probe(backend, texts)
    end = time.monotonic() + PROBE_WAIT
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _probe(backend: Tokenizer, texts: Sequence[str]) -> None:
    """Tokenize texts in this fork, and end it: with 0 if all went well."""
    code = 1
    try:
        import resource  # Windows has none

        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)  # Rust prints a panic itself
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for kind, wanted in ((resource.RLIMIT_CPU, PROBE_SECONDS), (resource.RLIMIT_AS, mapped + PROBE_BYTES)):
            hard = resource.getrlimit(kind)[1]
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (soft, hard))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        backend.no_padding()
        backend.no_truncation()
        for text in texts:
            # one text, not a batch: the threads of batches do not exist in a fork
            backend.decode(backend.encode(text).ids)
        code = 0
    finally:
        os._exit(code)
