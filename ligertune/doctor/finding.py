"""One line of the doctor's."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Finding:
    """`advice` is empty where all is well; `command` is what to type then, if a command mends it."""

    what: str
    value: str
    advice: str = ""
    command: str = ""

    @property
    def ok(self) -> bool:
        return not self.advice

    def as_dict(self) -> dict:
        return {**asdict(self), "ok": self.ok}
