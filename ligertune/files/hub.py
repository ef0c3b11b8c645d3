"""The Hugging Face hub: is it in reach, and does the cache of this machine hold a model or a data set.

Without a network the hub's libraries ask for each file six times, for 23 s, with a warning each time. So the first hub
id that a process meets asks the hub once; without an answer the process reads from the cache from then on.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ligertune.errors import UserError, message_of

# A hub in reach answers within 1 s, also from another continent. DNS servers that are out of reach take 10 s and more.
ANSWER_SECONDS = 4.0
_GATEWAY_ERRORS = (502, 503, 504)  # of a hub that is down; its libraries would repeat the request
# a repository of a model has one of these, and one with a tokenizer has one of those
MODEL_FILES = ("config.json", "adapter_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

_lost: list[str] = []  # why this process reads from the cache, if the hub did not answer


def why_unreachable() -> str:
    """Return why the hub cannot be asked, such as "... does not answer"; "" if it answers.

    If it does not answer, the hub's libraries are switched to their offline mode, as by HF_HUB_OFFLINE=1.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _lost[0] if _lost else "HF_HUB_OFFLINE is set"
    reason = _ask(constants.ENDPOINT)
    if reason:
        _lost[:] = [reason]
        constants.HF_HUB_OFFLINE = True
    return reason


def hub_notes() -> tuple[str, ...]:
    """Return a note if this process read from the cache because the hub did not answer."""
    said = "models and data sets of the hub come from the cache of this machine, which may be older than the hub's"
    return tuple(f"the hub could not be reached ({reason}): {said}" for reason in _lost)


def check_hub_model(
    name: str, *, key: str, revision: str | None = None, files: Sequence[str] = MODEL_FILES, hint: str = ""
) -> None:
    """Raise UserError for a hub id that is not in the cache if the hub is out of reach.

    key: begins the message. files: the model is in the cache if one of them is. hint: for the error.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    reason = why_unreachable()
    if not reason:
        return
    try:
        if any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files):
            return
    except HFValidationError as problem:
        reason = message_of(problem).rstrip(".")
    raise UserError(
        f"{key}: {name} is not a folder here, and the hub could not be reached ({reason}). The cache of this machine"
        f" does not hold {'it' if revision in (None, 'main') else f'its revision {revision}'}.",
        hint=hint or "Check the spelling and the network, or name a folder.",
    )


def check_hub_dataset(name: str, *, key: str, streaming: bool) -> None:
    """Raise UserError for a data set of the hub that cannot be read because the hub is out of reach."""
    reason = why_unreachable()
    if not reason or (not streaming and _has_dataset(name)):
        return
    stored = "A streamed data set needs the hub." if streaming else "The cache of this machine does not hold it."
    raise UserError(
        f"{key}: {name} is neither a file or folder here nor a data set on the hub: the hub could not be reached"
        f" ({reason}). {stored}",
        hint="Check the path and the network.",
    )


def _has_dataset(name: str) -> bool:
    """Return whether a data set may be in the cache of `datasets`, whose folders are called user___name."""
    from huggingface_hub.constants import HF_HOME

    folder = Path(os.environ.get("HF_DATASETS_CACHE", Path(HF_HOME) / "datasets")).expanduser()
    # `datasets` writes capital letters of the name in its own way: OpenOrca becomes open_orca
    wanted = _letters(name)
    return folder.is_dir() and any(_letters(path.name) == wanted for path in folder.iterdir())


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


@cache
def _ask(endpoint: str) -> str:
    """Return why a hub does not answer, or "". It is asked by a thread: a search for its address has no time limit."""
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_request(endpoint)), daemon=True).start()
    try:
        return answers.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        return f"{endpoint} gave no answer in {ANSWER_SECONDS:.0f} s"


def _request(endpoint: str) -> str:
    from httpx import HTTPError, InvalidURL
    from huggingface_hub import get_session

    problem = ""
    for _ in range(2):  # a connection can break once
        try:
            status = get_session().head(endpoint, timeout=ANSWER_SECONDS, follow_redirects=False).status_code
            problem = f"{endpoint} answers with status {status}"
            if status not in _GATEWAY_ERRORS:
                return ""
        except (HTTPError, InvalidURL, OSError) as error:
            problem = f"{endpoint}: {str(error).strip() or type(error).__name__}"
        time.sleep(0.3)
    return problem
