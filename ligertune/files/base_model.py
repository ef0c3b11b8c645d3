"""Facts about the base model of a run, as plans, checkpoints and saved models record them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class TrainedBase:
    """The base model as a run trains it: what exports and checks load again, and what the model card says.

    dtype: of its weights. stored_as: how the method quantises them. quantization: of the base's own files, which are
    dequantised to `dtype`. revision: commit or branch on the hub; None for a folder. fingerprint: of a folder's files.
    """

    name: str
    dtype: Literal["float32", "bfloat16", "float16"]
    stored_as: Literal["nf4", "int8"] | None = None
    quantization: str | None = None
    revision: str | None = None
    fingerprint: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the values for ligertune.json."""
        return asdict(self)

    def __str__(self) -> str:
        parts = (
            None if self.fingerprint else self.name,  # a folder may be named by another path
            self.dtype,
            {"nf4": "in 4 bits", "int8": "in 8 bits"}.get(self.stored_as or ""),
            self.revision and f"revision {self.revision}",
            self.fingerprint and f"files {self.fingerprint[:12]}",
        )
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class CarriedTensors:
    """Tensors of a base that its model class does not load. A saved model holds them unchanged.

    dropped: why they cannot be saved; config.json then does not name them.
    """

    names: tuple[str, ...] = ()
    bytes: int = 0
    dropped: str = ""

    @property
    def saved_bytes(self) -> int:
        """Bytes that they add to a saved model."""
        return 0 if self.dropped else self.bytes
