"""Compare a tiny model of any family with and without kernels: loss, gradients, logits, generation, and unpatching."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from ligertune.patching.mixers.mixer_functions import OPS as MIXER_OPS
from ligertune.patching.patch import NONE_FOUND, PatchReport, patch, unpatch
from support.models.tiny_families import class_name, inputs_of, tiny_family

TOLERANCE = 1e-4  # of the loss, of a parameter's largest gradient, of the largest logit: sums in another order
LEAST = 1e-3  # share of the largest gradient of all below which a parameter's is zero but for rounding
Run = Callable[[nn.Module, str], Tensor]
Outcome = Literal["same", "differs", "crashes", "not built"]


@dataclass(frozen=True)
class LayerState:
    """What `patch` did with one kind of layer. applied: patched modules by kernel; left: how many are not, and why.

    present: the model has such layers, found or not. not_needed: it has layers for which a kernel would gain nothing.
    """

    applied: Mapping[str, int] = field(default_factory=dict)
    left: int = 0
    why: str = ""
    present: bool = False
    not_needed: bool = False

    @property
    def patched(self) -> bool:
        """Whether the model has such layers and all of them are patched."""
        return any(self.applied.values()) and not self.left

    def __str__(self) -> str:
        parts = [f"{name} {count}" for name, count in self.applied.items() if count]
        parts += [f"{self.left} left"] * bool(self.left)
        return ", ".join(parts) or ("not found" if self.present else "not needed" if self.not_needed else "none")


@dataclass(frozen=True)
class FamilyResult:
    """One entry of transformers' tables. error: the largest relative difference of loss, gradients and logits.

    layers: by kind: norm, rope, MLP, mixer, loss.
    """

    kind: str
    model_type: str
    class_name: str
    outcome: Outcome
    note: str = ""
    error: float = 0.0
    layers: Mapping[str, LayerState] = field(default_factory=dict)

    @property
    def kernels(self) -> dict[str, int]:
        """Patched modules by kernel."""
        return {name: count for state in self.layers.values() for name, count in state.applied.items() if count}

    @property
    def counts(self) -> bool:
        """Whether this is a dense causal family with norms, RoPE and a gated MLP, of which all four can be patched."""
        if self.kind != "causal" or not self.layers:
            return False
        is_dense = "experts" not in self.layers["MLP"].applied
        return is_dense and all(self.layers[kind].present for kind in ("norm", "rope", "MLP"))

    @property
    def lacks(self) -> dict[str, LayerState]:
        """Kinds of layers that are not patched, or not all of them. A model without a mixer lacks none."""
        absent = {kind for kind, state in self.layers.items() if kind == "mixer" and not state.present}
        return {kind: state for kind, state in self.layers.items() if not state.patched and kind not in absent}


def check_family(kind: str, model_type: str) -> FamilyResult:
    """Build, patch, compare and unpatch one family."""
    about = kind, model_type, class_name(kind, model_type)
    try:
        plain = tiny_family(kind, model_type)
        expected = _train(plain, model_type)
        outputs = {name: _output(run, plain, model_type) for name, run in OUTPUTS.items()}
    except Exception as error:  # whatever a family raises for sizes or inputs that it does not have
        return FamilyResult(*about, "not built", _first_line(error))
    try:
        return FamilyResult(*about, *_compare(plain, expected, outputs, model_type))
    except Exception as error:
        return FamilyResult(*about, "crashes", _first_line(error))


def _output(run: Run, model: nn.Module, model_type: str) -> Tensor | None:
    """Return logits or generated tokens; None if the family itself cannot make them from our inputs."""
    try:
        return run(model, model_type)
    except Exception:
        return None


def _compare(
    plain: nn.Module, expected: dict[str, Tensor], outputs: dict[str, Tensor | None], model_type: str
) -> tuple[Outcome, str, float, dict[str, LayerState]]:
    patched = copy.deepcopy(plain)
    classes = [type(module) for module in patched.modules()]
    report = patch(patched)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _train(patched, model_type)
    made = any("materialised logits" in str(warning.message) for warning in caught)
    notes = [f"no {name} without kernels either" for name, output in outputs.items() if output is None]
    errors = _errors(found, expected)
    for name, output in outputs.items():
        if output is not None:
            errors[name] = _error(OUTPUTS[name](patched, model_type), output)
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE]
    restored = not unpatch(patched) and [type(module) for module in patched.modules()] == classes
    again = _train(patched, model_type)
    if not restored or any(not torch.equal(again[name], expected[name]) for name in expected):
        wrong.append("unpatched")
    layers = layer_states(plain, report, logits_are_made=made)
    return "differs" if wrong else "same", ", ".join(wrong[:3] + notes), max(errors.values()), layers


ROPE_SETTINGS = ("rope_parameters", "rope_theta", "rotary_dim", "rotary_pct")


def layer_states(model: nn.Module, report: PatchReport, *, logits_are_made: bool = False) -> dict[str, LayerState]:
    """Return what `patch` did with norms, rotations, MLPs, mixers and the loss of a model."""
    *rows, loss = report.rows
    kinds = {"norm": [], "rope": [], "MLP": [], "mixer": []}
    for row in rows:
        kinds[_kind_of(row.kernel)].append(row)
    # RoPE that `patch` does not find would be left out of the count, so another sign of it is looked for, too
    rotates = any("rotary" in type(module).__name__.lower() for module in model.modules())
    rotates |= any(getattr(model.config.get_text_config(), name, None) is not None for name in ROPE_SETTINGS)
    states = {
        kind: LayerState(
            {row.kernel: row.applied for row in of_kind if row.applied or row.left},
            sum(row.left for row in of_kind),
            "; ".join(row.note for row in of_kind if row.left),
            any(row.applied or row.left for row in of_kind) or (kind == "rope" and rotates),
            any(row.note and row.note != NONE_FOUND for row in of_kind),
        )
        for kind, of_kind in kinds.items()
    }
    fused = loss.applied and not logits_are_made
    why = "logits are made" if logits_are_made else loss.note
    states["loss"] = LayerState({loss.kernel: 1} if fused else {}, 0 if fused else 1, "" if fused else why, True)
    return states


def _kind_of(kernel: str) -> str:
    if kernel in MIXER_OPS:
        return "mixer"
    return "norm" if "norm" in kernel else "rope" if "rope" in kernel else "MLP"


def _train(model: nn.Module, model_type: str) -> dict[str, Tensor]:
    """Return the loss of one training step and the gradient of every parameter that has one."""
    model.train().zero_grad()
    torch.manual_seed(0)
    output = model(**inputs_of(model_type))
    output.loss.backward()
    if not torch.isfinite(output.loss):
        raise ValueError(f"its loss is {float(output.loss)}")
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **gradients}


@torch.no_grad()
def _logits(model: nn.Module, model_type: str) -> Tensor:
    torch.manual_seed(0)
    inputs = {name: value for name, value in inputs_of(model_type).items() if name != "labels"}
    return model.eval()(**inputs).logits


@torch.no_grad()
def _generate(model: nn.Module, model_type: str) -> Tensor:
    """Return greedy tokens."""
    torch.manual_seed(0)
    inputs = {name: value for name, value in inputs_of(model_type).items() if name != "labels"}
    return model.eval().generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0).float()


OUTPUTS: dict[str, Run] = {"logits": _logits, "generation": _generate}


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    largest = max(float(value.abs().max()) for name, value in expected.items() if name != "loss" and value.numel())
    missing = {name: float("inf") for name in found.keys() ^ expected.keys()}
    both = found.keys() & expected.keys()
    return missing | {
        name: _error(found[name], expected[name], least=0.0 if name == "loss" else LEAST * largest) for name in both
    }


def _error(found: Tensor, expected: Tensor, *, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest value."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    infinite = expected.isinf() & (found == expected)  # logits of masked classes
    off, size = (
        (t.masked_fill(infinite, 0.0).abs().max()) for t in (found - expected.masked_fill(infinite, 0.0), expected)
    )
    return float(off) / max(float(size), least, 1e-12)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:200]
