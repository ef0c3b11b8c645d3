"""The process in which a user's score functions run: it can be ended at any time, and what they print is no report.

It gets pickled requests on standard input and writes JSON lines to standard output: `python -m` runs it. torch is not
imported, so it starts in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import math
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from ligertune.errors import UserError, message_of
from ligertune.files.user_functions import load_function

PR_SET_PDEATHSIG = 1  # option of Linux' prctl
_GIVEN = ("completions", "prompts")


def accepted_arguments(function: Callable[..., Any]) -> tuple[list[str], list[str], bool]:
    """Return the names that a function requires, those that it takes, and whether it takes any other."""
    required = []
    taken = []
    takes_any = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            taken.append(parameter.name)
            if parameter.default is parameter.empty:
                required.append(parameter.name)
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"it takes {parameter.name} by position only, and its arguments are given by name.")
    return required, taken, takes_any


def checked_scores(found: Any, answers: int) -> list[float]:
    """Return the scores of a function as numbers. Raises UserError, as the end of a sentence, for anything else."""
    if inspect.isawaitable(found):
        raise UserError("returned a coroutine of a coroutine: await it.")
    if hasattr(found, "tolist"):  # an array or a tensor
        found = found.tolist()
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise UserError(f"returned {type(found).__name__}, and not a list of numbers.")
    if len(found) != answers:
        raise UserError(f"returned {len(found)} scores for {answers} answers.")
    scores = []
    for number, score in enumerate(found, start=1):
        if inspect.isawaitable(score):
            if inspect.iscoroutine(score):
                score.close()  # Python would warn that it was never awaited
            raise UserError(f"returned a coroutine as score {number}: await it.")
        if isinstance(score, str | bytes) or not hasattr(score, "__float__"):
            raise UserError(f"returned {type(score).__name__} as score {number}, and not a number.")
        value = float(score)
        if not math.isfinite(value):
            raise UserError(f"returned {value} as score {number}.")
        scores.append(value)
    return scores


async def _awaited(found: Any) -> Any:
    return await found


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> list[float]:
    _, taken, takes_any = accepted_arguments(function)
    given = {name: values for name, values in arguments.items() if takes_any or name in taken}
    found = function(**given)
    if inspect.isawaitable(found):
        found = asyncio.run(_awaited(found))
    return checked_scores(found, len(arguments["completions"]))


def serve(requests: BinaryIO, send: Callable[[dict[str, Any]], object]) -> None:
    """Load the functions that the first request names, and answer the others, (index of the function, arguments)."""
    names, key = pickle.load(requests)
    functions = []
    try:
        functions = [load_function(name, key=key) for name in names]
        send({"required": [accepted_arguments(function)[0] for function in functions]})
    except UserError as problem:
        send({"problem": str(problem)})
        return
    while True:
        try:
            index, arguments = pickle.load(requests)
        except EOFError:  # the command has ended
            return
        try:
            send({"scores": _call(functions[index], arguments)})
        except UserError as problem:
            send({"problem": problem.message})
        except Exception as error:  # of a user's code
            send({"problem": f"raised {type(error).__name__}: {message_of(error)}."})


def main() -> None:
    """Answer requests until standard input ends. Everything that the functions print goes to standard error."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a function that hangs does not outlive the command
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1)  # by line: a signal ends the process, and would lose the rest
    sys.dont_write_bytecode = True  # writes no __pycache__ next to the user's file

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()

    serve(requests, send)


if __name__ == "__main__":
    main()
