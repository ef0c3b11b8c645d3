"""The one exception a user is meant to see."""

from __future__ import annotations


class UserError(Exception):
    """The user's input is wrong: one clear sentence, exit code 2, no traceback.

    `message` says where and what was found; `hint` says what to write instead.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple:
        # keyword-only arguments are lost by the default pickling between processes
        return (_rebuild, (self.message, self.hint))


def _rebuild(message: str, hint: str) -> UserError:
    return UserError(message, hint=hint)
