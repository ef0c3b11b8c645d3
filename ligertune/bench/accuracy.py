"""Accuracy of an implementation: relative error of outputs and gradients against plain torch in float64.

The float64 results are computed for a part of the rows at a time, to fit in memory: outputs are independent by row, and
the gradients of weights add up. The error is |found - truth| / |truth| in the Euclidean norm.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ligertune.bench.case import Case, OpBenchmark, Outputs, Tensors

PART_ELEMENTS = 1 << 27  # of the widest tensor of a part: 1 GiB in float64
Upstream = list[torch.Tensor | None]  # gradient of each output; None for a loss


def leaves_of(args: Tensors) -> Tensors:
    """Return the arguments that require a gradient."""
    return tuple(t for t in args if t.requires_grad)


def as_tuple(outputs: Outputs) -> Tensors:
    """Return the outputs as a tuple, also if there is only one."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def upstream_of(case: Case, outputs: Tensors) -> Upstream:
    """Return random upstream gradients: the same bits for every implementation and the reference."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [
        None if y.dim() == 0 else torch.randn(y.shape, device=y.device, generator=generator).to(case.dtype)
        for y in outputs
    ]


def like(upstream: Upstream, outputs: Tensors) -> Upstream:
    """Return the upstream gradients in the outputs' dtypes and memory layouts."""
    return [None if g is None else torch.empty_like(y).copy_(g) for g, y in zip(upstream, outputs, strict=True)]


def results(benchmark: OpBenchmark, args: Tensors, outputs: Tensors, gradients: Tensors) -> dict[str, torch.Tensor]:
    """Return outputs and gradients by name: "output 0", "gradient of weight"."""
    names = [name for name, t in zip(benchmark.args, args, strict=True) if t.requires_grad]
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return found | {f"gradient of {name}": g for name, g in zip(names, gradients, strict=True)}


def truth(benchmark: OpBenchmark, case: Case, args: Tensors) -> dict[str, torch.Tensor]:
    """Return outputs and gradients in float64, by name."""
    reference = benchmark.reference(case, args)
    named = dict(zip(benchmark.args, args, strict=True))
    shared = {name: _as_float64(t) for name, t in named.items() if name not in benchmark.row_args}
    outputs_of_parts: list[Tensors] = []
    row_gradients: dict[str, list[torch.Tensor]] = {name: [] for name in benchmark.row_args}
    upstream: Upstream = []
    for rows in _parts(benchmark, case, named):
        part = {name: shared[name] if name in shared else _as_float64(t[rows]) for name, t in named.items()}
        outputs = as_tuple(reference(*part.values()))
        upstream = upstream or _upstream_of_all_rows(benchmark, case, named, outputs)
        if leaves_of(args):
            torch.autograd.backward(outputs, [None if g is None else g[rows].double() for g in upstream])
        outputs_of_parts.append(tuple(y.detach() for y in outputs))
        for name, gradients_of_parts in row_gradients.items():
            gradient = part[name].grad
            if gradient is not None:  # labels and indices have none
                gradients_of_parts.append(gradient)
    outputs = tuple(
        torch.stack(ys).sum(0) if ys[0].dim() == 0 else torch.cat(ys) for ys in zip(*outputs_of_parts, strict=True)
    )
    gradients: list[torch.Tensor] = []
    for name, t in named.items():
        if t.requires_grad:
            gradient = shared[name].grad if name in shared else torch.cat(row_gradients[name])
            assert gradient is not None  # every leaf takes part in the outputs
            gradients.append(gradient)
    return results(benchmark, args, outputs, tuple(gradients))


def _upstream_of_all_rows(
    benchmark: OpBenchmark, case: Case, named: dict[str, torch.Tensor], outputs: Tensors
) -> Upstream:
    """Return the upstream gradients of the whole case, given the outputs of one part."""
    n_rows = next((named[name].shape[0] for name in benchmark.row_args), None)
    whole = tuple(
        y if y.dim() == 0 else torch.empty((n_rows or y.shape[0], *y.shape[1:]), device=y.device) for y in outputs
    )
    return upstream_of(case, whole)


def _as_float64(t: torch.Tensor) -> torch.Tensor:
    return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t


def _parts(benchmark: OpBenchmark, case: Case, named: dict[str, torch.Tensor]) -> Iterator[slice]:
    if not benchmark.row_args:
        yield slice(None)
        return
    n_rows = named[benchmark.row_args[0]].shape[0]
    step = max(1, PART_ELEMENTS // max(case.sizes[1:], default=1))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def error_of(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return the relative error, computed by parts: another float64 copy of all logits might not fit in memory."""
    step = max(1, PART_ELEMENTS // max(1, true[0].numel())) if true.dim() else 1
    pairs = zip(torch.split(found, step), torch.split(true, step), strict=True) if true.dim() else ((found, true),)
    lost = 0.0
    size = 0.0
    for found_part, true_part in pairs:
        lost += (found_part.double() - true_part).square().sum().item()
        size += true_part.square().sum().item()
    return (lost / size) ** 0.5 if size else lost**0.5
