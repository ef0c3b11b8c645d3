"""adamw_step against float64 over several steps, with and without decay and scale; the gradient is not written."""

import pytest
import torch
from ligertune_kernels import AdamWOptions, adamw_step, adamw_step_reference
from support.covering import every_pair

# one element, a ragged block, whole blocks, and more than one of them in two dimensions
SHAPES = [(1,), (3, 7), (2, 1024), (3, 2049)]
OPTIONS = pytest.param(0.0, None), pytest.param(0.1, 4.0)  # weight decay, scale of the gradient
NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 0.05}  # an eps in another place is noticed
SLACK = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the parameter's range, after 3 steps


@pytest.mark.parametrize("shape, dtype, decay, scale", every_pair(SHAPES, tuple(SLACK), OPTIONS))
def test_agrees_with_float64(shape, dtype, decay, scale, device):
    ours = [torch.randn(shape, device=device, dtype=dtype)]
    ours += [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
    truth = [t.double() for t in ours]
    options = AdamWOptions(**NUMBERS, weight_decay=decay)
    divided_by = None if scale is None else torch.tensor(scale, device=device)
    for step in (1, 2, 3):
        grad = torch.randn(shape, device=device, dtype=dtype)
        kept = grad.clone()
        adamw_step(ours[0], grad, *ours[1:], options, step=step, grad_scale=divided_by)
        assert torch.equal(grad, kept)
        adamw_step_reference(truth[0], grad.double(), *truth[1:], options, step=step, grad_scale=divided_by)
    for found, expected in zip(ours, truth, strict=True):
        assert (found.double() - expected).abs().max() <= SLACK[dtype] * expected.abs().max()


def test_float64_agrees_with_torchs_adamw(device):
    param = torch.randn(5, 3, device=device, dtype=torch.float64, requires_grad=True)
    mine, states = param.detach().clone(), [torch.zeros(5, 3, device=device, dtype=torch.float64) for _ in range(2)]
    optimizer = torch.optim.AdamW([param], weight_decay=0.1, **NUMBERS)
    for step in (1, 2, 3):
        param.grad = torch.randn_like(param)
        optimizer.step()
        adamw_step(mine, param.grad, *states, AdamWOptions(**NUMBERS, weight_decay=0.1), step=step)
    torch.testing.assert_close(mine, param.detach())
