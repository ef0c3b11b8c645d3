"""Scores of answers by a user's functions, which run in a process of their own with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ligertune.errors import UserError, printable
from ligertune.features.sample.recipe import ScoreFunctionSpec
from ligertune.launcher.signals import before_leaving

KEY = "sample.score"
_LOADING_SECONDS = 300.0  # of the file itself: it may import torch, or load a model
_WORKER = "ligertune.features.sample.scoring.score_worker"


class ScoreFunctions:
    """The functions of `sample.score`. Entering the context starts their process, and loads the files.

    timeout: seconds of one call. Raises UserError (exit code 2) for a file that cannot be loaded.
    """

    def __init__(self, specs: Sequence[ScoreFunctionSpec], timeout: float) -> None:
        self.names = _names(specs)
        self.weights = [spec.weight for spec in specs]
        self._functions = [spec.function for spec in specs]
        self._timeout = timeout
        self._leaving = contextlib.ExitStack()
        self._required: list[list[str]] = []

    def __enter__(self) -> ScoreFunctions:
        if not self._functions:
            return self
        for function in self._functions:
            file = function.rpartition(":")[0]
            if not Path(file).is_file():
                raise UserError(f"{KEY}: there is no file {file}.", hint="Give its path, relative to the recipe.")
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for this process, which ends that one
        )
        self._leaving.enter_context(before_leaving(self._process.kill))
        self._replies: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._receive, name="replies of score functions", daemon=True).start()
        try:
            loaded = self._ask((self._functions, KEY), _LOADING_SECONDS, f"{KEY}: the file")
            if "problem" in loaded:
                raise UserError(str(loaded["problem"]))
            self._required = loaded["required"]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._functions:
            self._end()

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise UserError if a function requires an argument that is no column of the data."""
        known = {"completions", "prompts", *columns}
        for name, required in zip(self.names, self._required, strict=True):
            missing = [argument for argument in required if argument not in known]
            if missing:
                raise UserError(
                    f"{KEY}: {name} asks for {missing[0]}, and the data have the columns "
                    f"{', '.join(sorted(columns)) or 'none'}.",
                    hint="It gets completions, prompts and the columns of the data by name.",
                )

    def __call__(
        self, completions: Sequence[Any], prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> list[list[float]]:
        """Return the scores of each function. Raises UserError for one that fails, hangs or returns no numbers."""
        arguments = {**columns, "completions": list(completions), "prompts": list(prompts)}
        found = []
        for index, name in enumerate(self.names):
            reply = self._ask((index, arguments), self._timeout, f"{KEY}: {name}")
            if "problem" in reply:
                raise UserError(
                    f"{KEY}: {name} {printable(str(reply['problem']), one_line=True)}", hint="All answers are kept."
                )
            found.append([float(score) for score in reply["scores"]])
        return found

    def _ask(self, request: Any, seconds: float, who: str) -> dict[str, Any]:
        """Send a request to the process, and return its reply. Raises UserError if there is none in time."""
        content = pickle.dumps(request)
        # in a thread: a process that hangs does not read, and the pipe holds 64 KiB
        threading.Thread(target=self._send, args=(content,), name="request of score functions", daemon=True).start()
        try:
            reply = self._replies.get(timeout=seconds)
        except queue.Empty:
            self._end()
            raise UserError(
                f"{who} took more than {seconds:g} seconds and was ended.",
                hint="All answers are kept. sample.score_timeout sets the limit of one call.",
            ) from None
        if not reply:
            code = self._process.wait()
            raise UserError(f"{who} ended its process (exit code {code}).", hint="All answers are kept.")
        found: dict[str, Any] = json.loads(reply)
        return found

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the process has ended: its reply says so
            self._process.stdin.write(content)
            self._process.stdin.flush()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(b"")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._leaving.close()


def _names(specs: Sequence[ScoreFunctionSpec]) -> list[str]:
    """Return the names of the functions; with the file if two have one name."""
    names = [spec.function.rpartition(":")[2] for spec in specs]
    if len(set(names)) == len(names):
        return names
    return [f"{Path(spec.function.rpartition(':')[0]).stem}:{name}" for spec, name in zip(specs, names, strict=True)]


def _environment() -> dict[str, str]:
    """Return the environment of the process: it finds the modules that this one finds."""
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
