"""MLPs that do more than down(act(gate) * up): their own forward runs, and our kernel computes act(gate) * up in it.

Gemma 3n sparsifies the gate first, Zamba 2 adds the output of an adapter to it, others normalise or drop the product.
The activation returns a `DeferredActivation`, which only can be multiplied: its product with up is the kernel's.
Recognition runs the forward on a few numbers with and without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from ligertune_kernels import geglu, reglu, swiglu
from torch import Tensor, nn

from ligertune.patching.mlps.activations import Approximate, GatedKernel, kind_of, relu_of
from ligertune.patching.mlps.mlp_members import projections_of, size_of, structure_of
from ligertune.patching.module_patch import ModulePatch
from ligertune.patching.probe import Refusal, answer, close, numbers
from ligertune.patching.recompute import RecomputableOutput, mark_recomputable


@dataclass(frozen=True)
class ProductSpec:
    """The kernel that multiplies act(gate) by up within a module's own forward.

    name: attribute of the activation. squared: of `reglu`.
    """

    kernel: GatedKernel
    approximate: Approximate
    name: str
    squared: bool = False

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return act(gate) * up (..., F). Neither is overwritten: the forward may read them again."""
        if self.kernel == "reglu":
            return reglu(gate, up, squared=self.squared)
        return swiglu(gate, up) if self.kernel == "swiglu" else geglu(gate, up, approximate=self.approximate)


class DeferredActivation:
    """act(gate), which is not computed before it is multiplied by up."""

    __slots__ = ("_activation", "_gate", "_product")

    def __init__(self, activation: Callable[[Tensor], Tensor], product: Callable[..., Tensor], gate: Tensor) -> None:
        self._activation = activation
        self._product = product
        self._gate = gate

    def __mul__(self, up: Tensor) -> Tensor:
        if up.dtype != self._gate.dtype or up.shape != self._gate.shape:  # under autocast, after a layer in fp32
            return self._activation(self._gate) * up
        return self._product(self._gate, up)

    __rmul__ = __mul__


class KernelProduct(ModulePatch):
    """Mixin of an MLP whose own forward runs: its activation is deferred. torch.compile fuses the product itself."""

    patch_spec: ProductSpec

    @classmethod
    def class_body(cls, original: type, spec: ProductSpec) -> dict[str, Any]:
        def activation(self: KernelProduct) -> Callable[[Tensor], Any]:
            own = self._modules.get(spec.name) or vars(self)[spec.name]  # this property hides the attribute
            return own if torch.compiler.is_compiling() else partial(DeferredActivation, own, self.multiply)

        return {spec.name: property(activation)}

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return act(gate) * up (..., F)."""
        return self.patch_spec.product(gate, up)


class RecomputedProduct(RecomputableOutput, KernelProduct):
    """Mixin of such an MLP, whose down projection does not keep its input if that is the product."""

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        return mark_recomputable(super().multiply(gate, up), self.patch_spec.product, gate, up)


# ---- recognition

_found: dict[Hashable, ProductSpec | Refusal] = {}  # by the structure of a module
LARGEST = 1 << 20  # elements of a parameter that the probe fills
TOKENS = 6


def recognise_product(module: nn.Module) -> ProductSpec | Refusal:
    """Return the kernel that may multiply the activation of an MLP by up, or why there is none."""
    structure = structure_of(module)
    if structure is None:
        return _recognise(module)
    if structure not in _found:
        _found[structure] = _recognise(module)
    return _found[structure]


def _recognise(module: nn.Module) -> ProductSpec | Refusal:
    projections = projections_of(module)
    held = {name: value for name, value in vars(module).items() if not name.startswith("_")} | module._modules
    functions = {n: v for n, v in held.items() if callable(v) and n not in dict(projections) and _has_no_parameters(v)}
    specs = {name: _spec_of(name, function) for name, function in functions.items()}
    found = [spec for spec in specs.values() if not isinstance(spec, Refusal)]
    if len(found) != 1:
        named = [specs[name] for name in ("act_fn", "activation_fn", "act", "activation") if name in specs]
        return named[0] if len(found) == 0 and named else Refusal("it does not hold one activation")
    spec = found[0]
    hidden = _most_common_inputs(module)
    for dtype, training in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        plain = _stand_in(module, "", dtype)
        if isinstance(plain, Refusal):
            return plain
        x = numbers(2, TOKENS, hidden, dtype=dtype)
        tried = [_refuse(plain.train(training), functions[spec.name], spec, x, *more) for more in _arguments(held)]
        refusals = [refusal for refusal in tried if refusal is not None]
        if len(refusals) == len(tried):
            return refusals[0]
    return spec


def _spec_of(name: str, activation: Callable[[Tensor], Tensor]) -> ProductSpec | Refusal:
    kind = kind_of(activation)
    if not isinstance(kind, Refusal):
        return ProductSpec(*kind, name)
    squared = relu_of(activation)
    return kind if isinstance(squared, Refusal) else ProductSpec("reglu", "none", name, squared)


def _arguments(held: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return what a forward may take after the hidden states: nothing, or a number that a dict of the module has."""
    keys = (key for value in held.values() if isinstance(value, dict) for key in value if type(key) is int)
    return [(), *((key,) for key in keys)]  # Zamba 2: the number of a layer that shares the MLP


def _refuse(
    plain: nn.Module, activation: Callable[[Tensor], Tensor], spec: ProductSpec, x: Tensor, *more: int
) -> Refusal | None:
    """Return why a stand-in's forward cannot take a deferred activation, or None. x: (B, T, E)."""
    products = []

    def product(gate: Tensor, up: Tensor) -> Tensor:
        products.append(gate)
        return activation(gate) * up

    results = []
    for function in (activation, partial(DeferredActivation, activation, product)):
        plain._modules.pop(spec.name, None)
        vars(plain)[spec.name] = function
        # a dropout must draw the same numbers in both runs
        given = answer(lambda: (torch.manual_seed(0), type(plain).forward(plain, x.clone(), *more))[1])
        if isinstance(given, Refusal):
            return given
        results.append(given)
    same = isinstance(results[0], Tensor) and close(results[1], results[0], rtol=1e-6, atol=1e-6)
    return None if same and len(products) == 1 else Refusal("it does not multiply its activation by one tensor")


def _has_no_parameters(value: Any) -> bool:
    return not isinstance(value, nn.Module) or next(value.parameters(), None) is None


def _most_common_inputs(module: nn.Module) -> int:
    """Return the inputs that most projections have: the hidden size."""
    sizes = [inputs for _, (inputs, _) in projections_of(module)]
    return max(sizes, key=sizes.count)


class _LinearStandIn(nn.Module):
    """Replacement of a linear layer: each output is one input times a factor that no other output has."""

    def __init__(self, size: tuple[int, int], name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs, self.outputs = size
        self.seed = sum(map(ord, name))
        self.weight = torch.empty(0, dtype=dtype, device="cpu")  # some forwards read its dtype

    def forward(self, x: Tensor) -> Tensor:
        columns = torch.arange(self.outputs, device="cpu") % self.inputs
        return x[..., columns] * numbers(self.outputs, seed=self.seed).to(x.dtype)


def _stand_in(module: nn.Module, name: str, dtype: torch.dtype) -> nn.Module | Refusal:
    """Return a module of the same class on the CPU: linear layers are replaced, other parameters are small numbers."""
    size = size_of(module)
    if size is not None:
        return _LinearStandIn(size, name, dtype)
    cls = type(module)
    shell = cls.__new__(cls)
    nn.Module.__init__(shell)
    own = vars(nn.Module())
    vars(shell).update({key: value for key, value in vars(module).items() if key not in own})
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and (tensor.numel() > LARGEST or not tensor.is_floating_point()):
            return Refusal(f"it also computes with {key}")
        values = None if tensor is None else numbers(*tensor.shape, seed=3, dtype=dtype)
        shell._parameters[key] = None if values is None else nn.Parameter(values, requires_grad=False)
    for key, child in module._modules.items():
        made = None if child is None else _stand_in(child, f"{name}.{key}", dtype)
        if isinstance(made, Refusal):
            return made
        shell._modules[key] = made
    return shell
