"""Checks of the arguments of `experts`: shapes, integers, names of options."""

from __future__ import annotations

from typing import get_args

import torch

from ligertune_kernels.ops.moe._expert_options import ACTIVATIONS, ExpertParameters, Products


def check_experts(
    hidden: torch.Tensor,  # (..., E)
    expert_index: torch.Tensor,  # (..., K)
    expert_weights: torch.Tensor,  # (..., K)
    parameters: ExpertParameters,
) -> None:
    """Raise ValueError if shapes do not fit each other, or for unknown options.

    Weights that functions make are checked by `check_made_weight` when they are made.
    """
    if expert_index.shape != expert_weights.shape or expert_index.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"experts: hidden is {tuple(hidden.shape)}, expert_index {tuple(expert_index.shape)} and expert_weights "
            f"{tuple(expert_weights.shape)}: expected (..., E), (..., K) and (..., K)"
        )
    if expert_index.is_floating_point() or expert_index.is_complex():
        raise ValueError(f"experts: expert_index is {expert_index.dtype}; expected integers")
    _check_options(parameters)
    _check_shapes(hidden.shape[-1], parameters)


def _check_options(parameters: ExpertParameters) -> None:
    activation = parameters.options.activation
    products = parameters.options.products
    if activation.function not in ACTIVATIONS:
        raise ValueError(f"experts: the activation is {activation.function!r}; expected one of {ACTIVATIONS}")
    if activation.limit is not None and not activation.limit > 0:
        raise ValueError(f"experts: the activation's limit is {activation.limit}; expected a positive number or None")
    if activation.alpha != 1.0 and activation.function != "silu":
        raise ValueError(f"experts: alpha is {activation.alpha}, but {activation.function} has none")
    if products is not None and products not in get_args(Products):
        raise ValueError(f"experts: products is {products!r}; expected one of {get_args(Products)} or None")


def _check_shapes(n_hidden: int, parameters: ExpertParameters) -> None:
    """Compare every tensor with the number and width of the experts, which the first of them with these sizes gives."""
    tensors = parameters.tensors
    transposed = parameters.options.layout.transposed
    given = {name: tuple(t.shape) for name, t in tensors._asdict().items() if t is not None}
    expected = {
        "gate_up": ("X", n_hidden, "2F") if transposed else ("X", "2F", n_hidden),
        "down": ("X", "F", n_hidden) if transposed else ("X", n_hidden, "F"),
        "gate_up_bias": ("X", "2F"), "down_bias": ("X", n_hidden),
        "gate_up_a": ("X", "R1", n_hidden), "gate_up_b": ("X", "2F", "R1"),
        "down_a": ("X", "R2", "F"), "down_b": ("X", n_hidden, "R2"),
    }  # fmt: skip
    sizes: dict[str | int, int] = {}
    for name, shape in given.items():
        letters = expected[name]
        if len(shape) == len(letters):
            for letter, size in zip(letters, shape, strict=True):
                if letter == "2F" and size % 2 == 0:
                    sizes.setdefault("F", size // 2)
                sizes.setdefault(letter, size)
                if letter == "F":
                    sizes.setdefault("2F", 2 * size)
        wanted = tuple(letter if isinstance(letter, int) else sizes.get(letter, letter) for letter in letters)
        if shape != wanted or sizes.get("2F", 0) % 2:
            raise ValueError(
                f"experts: {name} is {shape}; expected {_written(letters)} = {_written(wanted)}, "
                f"{n_hidden} being the size of hidden{', for transposed weights' if transposed else ''}"
            )


def _written(shape: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def check_made_weight(weight: torch.Tensor, n_inputs: int, transposed: bool) -> None:
    """Raise ValueError if a weight that a function has made does not have n_inputs inputs."""
    if weight.dim() != 3 or weight.shape[1 if transposed else 2] != n_inputs:
        expected = f"(X, {n_inputs}, outputs)" if transposed else f"(X, outputs, {n_inputs})"
        raise ValueError(f"experts: a function made a weight of {tuple(weight.shape)}; expected {expected}")
