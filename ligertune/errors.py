"""The one exception a user is meant to see."""

from __future__ import annotations


class UserError(Exception):
    """One clear sentence instead of a traceback.

    `message` says where and what was found; `hint` says what to write instead. `exit_code` is 2 when the input was
    wrong and 1 when the run itself failed (a loss that is not a number, memory that ran out).
    """

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple:
        # keyword-only arguments are lost by the default pickling between processes
        return (_rebuild, (type(self), self.message, self.hint, self.exit_code))


def _rebuild(kind: type[UserError], message: str, hint: str, exit_code: int) -> UserError:
    return kind(message, hint=hint, exit_code=exit_code)
