"""Facts about the base model of a run, as plans, checkpoints and saved models record them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

# Formats in which bitsandbytes stores frozen weights. 4 bits: NF4 or FP4, with double quantisation or "single".
StoredAs: TypeAlias = Literal["nf4", "nf4_single", "fp4", "fp4_single", "int8"]
# What a run holds: such a format, or that of the base's own files.
HeldAs: TypeAlias = StoredAs | Literal["as in the files"]
STORED_AS: tuple[StoredAs, ...] = get_args(StoredAs)


def four_bit_format(stored_as: HeldAs | None) -> tuple[Literal["nf4", "fp4"], bool] | None:
    """Return (bnb_4bit_quant_type, bnb_4bit_use_double_quant); None for weights that are not in 4 bits."""
    if stored_as in (None, "int8", "as in the files"):
        return None
    return "nf4" if stored_as.startswith("nf4") else "fp4", not stored_as.endswith("_single")


def stored_bits(stored_as: StoredAs | None) -> int | None:
    """Return the bits of a stored weight, 4 or 8; None for weights that are not quantised."""
    if stored_as is None:
        return None
    return 8 if stored_as == "int8" else 4


@dataclass(frozen=True)
class TrainedBase:
    """The base model as a run trains it: what exports and checks load again, and what the model card says.

    dtype: of its weights. stored_as: how the method quantises them. quantization: of the base's own files, which are
    dequantised to `dtype`. revision: commit or branch on the hub; None for a folder. fingerprint: of a folder's files.
    rope_parameters: those of the recipe that replace the base's. residual_of: the init_lora_weights whose adapter was
    subtracted before the weights were quantised.
    """

    name: str
    dtype: Literal["float32", "bfloat16", "float16"]
    stored_as: StoredAs | None = None
    quantization: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    rope_parameters: dict[str, Any] | None = None
    residual_of: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the values for ligertune.json."""
        return asdict(self)

    def __str__(self) -> str:
        parts = (
            None if self.fingerprint else self.name,  # a folder may be named by another path
            self.dtype,
            None if self.stored_as is None else f"in {stored_bits(self.stored_as)} bits",
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
