"""The result of one check of `ligertune doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report. advice: what is wrong, empty if nothing is; command: fixes it, if a command can."""

    what: str
    value: str
    advice: str = ""
    command: str = ""

    @property
    def ok(self) -> bool:
        return not self.advice

    def as_dict(self) -> dict:
        return {**asdict(self), "ok": self.ok}

    @classmethod
    def unless(cls, fine: bool, what: str, value: str, advice: str, command: str = "") -> Finding:
        """Return a finding with advice and command, or without them if all is fine."""
        return cls(what, value) if fine else cls(what, value, advice, command)
