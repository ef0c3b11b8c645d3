"""What an implementation loses against plain torch in float64, in outputs and gradients.

The truth is computed in parts of the rows, so that it fits: outputs are independent by row, the gradients of weights
add up. The error is |ours - truth| / |truth| in the Euclidean norm.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ligertune.bench.case import Case, Outputs, Subject, Tensors

PART_ELEMENTS = 1 << 27  # of the widest tensor of a part: 1 GiB in float64


def leaves_of(args: Tensors) -> Tensors:
    return tuple(t for t in args if t.requires_grad)


def as_tuple(outputs: Outputs) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def upstream_of(case: Case, outputs: Tensors) -> list[torch.Tensor | None]:
    """Random gradients of tensors, 1 of a loss: the same, to the last bit, for every implementation and the truth."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [
        None if y.dim() == 0 else torch.randn(y.shape, device=y.device, generator=generator).to(case.dtype)
        for y in outputs
    ]


def like(upstream: list[torch.Tensor | None], outputs: Tensors) -> list[torch.Tensor | None]:
    """In the outputs' dtypes and layouts."""
    return [None if g is None else torch.empty_like(y).copy_(g) for g, y in zip(upstream, outputs, strict=True)]


def results(subject: Subject, args: Tensors, outputs: Tensors, gradients: Tensors) -> dict[str, torch.Tensor]:
    """By name: "output 0", "gradient of weight"."""
    names = [name for name, t in zip(subject.args, args, strict=True) if t.requires_grad]
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return found | {f"gradient of {name}": g for name, g in zip(names, gradients, strict=True)}


def truth(subject: Subject, case: Case, args: Tensors) -> dict[str, torch.Tensor]:
    """Outputs and gradients in float64."""
    plain = subject.plain(case, args)
    wide = {
        name: t.detach().double().requires_grad_(t.requires_grad)
        for name, t in zip(subject.args, args, strict=True)
        if name not in subject.rows and t.is_floating_point()
    }
    parts: list[list[torch.Tensor]] = []
    row_gradients: dict[str, list[torch.Tensor]] = {name: [] for name in subject.rows}
    upstream: list[torch.Tensor | None] | None = None
    for rows in _parts(subject, case, args):
        part = [
            wide[name] if name in wide else _part(t, rows if name in subject.rows else slice(None))
            for name, t in zip(subject.args, args, strict=True)
        ]
        outputs = as_tuple(plain(*part))
        if upstream is None:
            upstream = _whole_upstream(subject, case, args, outputs)
        if leaves_of(tuple(part)):
            given = [None if g is None else g[rows].double() for g in upstream]
            torch.autograd.backward(outputs, given)
        parts.append([y.detach() for y in outputs])
        for name, t in zip(subject.args, part, strict=True):
            if name in row_gradients and t.requires_grad:
                row_gradients[name].append(t.grad)
    outputs = tuple(torch.stack(ys).sum(0) if ys[0].dim() == 0 else torch.cat(ys) for ys in zip(*parts, strict=True))
    gradients = tuple(
        torch.cat(row_gradients[name]) if name in subject.rows else wide[name].grad
        for name, t in zip(subject.args, args, strict=True)
        if t.requires_grad
    )
    return results(subject, args, outputs, gradients)


def _whole_upstream(subject: Subject, case: Case, args: Tensors, outputs: Tensors) -> list[torch.Tensor | None]:
    """From the outputs of one part, the upstream gradients of all rows."""
    n_rows = next((t.shape[0] for name, t in zip(subject.args, args, strict=True) if name in subject.rows), None)
    whole = tuple(
        y if y.dim() == 0 else torch.empty((n_rows or y.shape[0], *y.shape[1:]), device=y.device) for y in outputs
    )
    return upstream_of(case, whole)


def _part(t: torch.Tensor, rows: slice) -> torch.Tensor:
    part = t.detach()[rows]
    return part.double().requires_grad_(t.requires_grad) if t.is_floating_point() else part


def _parts(subject: Subject, case: Case, args: Tensors) -> Iterator[slice]:
    if not subject.rows:
        yield slice(None)
        return
    n_rows = args[subject.args.index(subject.rows[0])].shape[0]
    step = max(1, PART_ELEMENTS // max(case.sizes[1:], default=1))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def error_of(found: torch.Tensor, true: torch.Tensor) -> float:
    """Relative, by parts: one more float64 copy of all logits might not fit."""
    step = max(1, PART_ELEMENTS // max(1, true[0].numel())) if true.dim() else 1
    pairs = zip(found.split(step), true.split(step), strict=True) if true.dim() else ((found, true),)
    lost, size = 0.0, 0.0
    for ours, part in pairs:
        lost += (ours.double() - part).square().sum().item()
        size += part.square().sum().item()
    return (lost / size) ** 0.5 if size else lost**0.5
