"""Our float8 linear layers: gradients against float64, delayed scales, shared inputs, weight copies, frozen weights."""

import copy

import peft
import pytest
import torch
from support.models import tiny_models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.models.float8.delayed_scales import HEADROOM, HISTORY, DelayedScales
from ligertune.models.float8.float8_layers import to_float8
from ligertune.models.float8.float8_linear import Float8Linear, hold_frozen_weights, scales_of, to_float8_linears
from ligertune.patching.patch import patch
from ligertune.training.checkpoint.weight_files import read_scales, write_scales

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Rounding errors of independent elements: 0.58 of half the last bit, of both operands.
FORWARD, BACKWARD = 0.045, 0.08


def layer(in_features: int = 64, out_features: int = 48, *, count: int = 1, dtype=torch.float32) -> list[nn.Linear]:
    torch.manual_seed(0)
    made = [nn.Linear(in_features, out_features, dtype=dtype) for _ in range(count)]
    to_float8_linears(made, CPU)
    return made


def keep(amax: Tensor) -> Tensor:
    """Stand for the reduction over ranks: there is one."""
    return amax


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [(16,), (5, 7), (1,)], ids=str)  # 35 and 1 are no multiples of 16
def test_output_and_gradients_are_close_to_float64(rows):
    (ours,) = layer()
    truth = nn.Linear(64, 48, dtype=torch.float64)
    truth.load_state_dict(ours.state_dict())
    for step in range(3):  # the first step has no history
        x, dy = torch.randn(*rows, 64, requires_grad=True), 1e-4 * torch.randn(*rows, 48)
        exact = x.detach().double().requires_grad_()
        ours.zero_grad(), truth.zero_grad()
        y, expected = ours(x), truth(exact)
        y.backward(dy), expected.backward(dy.double())
        assert 1e-3 < error(y, expected) < FORWARD, step
        for found, right in ((x, exact), (ours.weight, truth.weight)):
            assert 1e-3 < error(found.grad, right.grad) < BACKWARD, step
        assert error(ours.bias.grad, truth.bias.grad) < 1e-6
        ours.float8_scales.update(keep)


def test_a_scale_follows_from_the_largest_amax_of_the_last_steps():
    scales = DelayedScales([E4M3, E5M2], CPU)
    amounts = [4.0, 8.0, *[1.0] * (HISTORY - 2), 2.0, 2.0]
    expected = [4.0, *[8.0] * HISTORY, 2.0]
    for amount, amax in zip(amounts, expected, strict=True):
        scales.quantize(0, torch.full((2, 16), -amount))
        scales.quantize(0, torch.full((2, 16), 0.5))  # another micro-batch
        scales.quantize(1, torch.full((2, 16), 100.0), record=False)  # an evaluation
        scales.update(keep)
        assert float(scales.scale[0, 0]) == 448 / (HEADROOM * amax)
        assert float(scales.inverse[0, 0] * scales.scale[0, 0]) == pytest.approx(1)
        assert float(scales.scale[1, 0]) == 1  # never seen


def test_values_beyond_the_history_are_cut_off_in_one_step_only():
    scales = DelayedScales([E4M3], CPU)
    scales.quantize(0, torch.ones(1, 16))
    scales.update(keep)
    for largest in (HEADROOM, 10.0):
        found = scales.quantize(0, torch.full((1, 16), 10.0))
        assert float(found.rows.float().max() * found.inverse) == pytest.approx(largest)
        scales.update(keep)


def test_layers_that_read_the_same_tensor_share_its_copies_and_scale():
    q, k, other = layer(count=3)
    x = torch.randn(16, 64)
    for _ in range(2):
        outputs = [each(x) for each in (q, k)] + [other(x.clone())]
        saved = [y.grad_fn.saved_tensors[0].data_ptr() for y in outputs]
        assert saved[0] == saved[1] != saved[2]
        q.float8_scales.update(keep)
    inputs = q.float8_scales.scale[[0, 3, 6], 0]
    assert (inputs == 448 / (HEADROOM * x.abs().max())).all()
    first = q(x).detach()
    x.mul_(0.5)  # the same tensor with other values
    assert error(q(x) - q.bias, 0.5 * (first - q.bias).double()) < 2e-2
    assert k(x).isfinite().all()


def test_a_weight_is_quantised_once_per_step_and_when_it_has_changed():
    (ours,) = layer()
    x = torch.randn(16, 64)
    copies = [ours.quantized_weight() for _ in range(2) if ours(x) is not None]
    assert copies[0] is copies[1]
    with torch.no_grad():
        ours.weight.mul_(2)  # loaded weights
    doubled = ours.quantized_weight()
    assert doubled is not copies[0]
    ours.float8_scales.update(keep)  # after the step of our AdamW kernel, which does not raise the version
    updated = ours.quantized_weight()
    assert updated is not doubled
    ours.float8_scales.forget_copies()  # a CUDA graph makes copies in its own memory
    again = ours.quantized_weight()
    assert again is not updated and torch.equal(again.rows, updated.rows)
    read = ours.quantized_input(x)
    assert ours.quantized_input(x) is read
    ours.float8_scales.forget_copies()
    assert ours.quantized_input(x) is not read


def test_recomputed_layers_round_as_the_forward_did():
    (ours,) = layer()
    gradients = []
    for recompute in (False, True, True):
        x = torch.linspace(-1, 1, 640).view(10, 64).requires_grad_()
        ours.zero_grad()
        y = checkpoint(ours, x, use_reentrant=False) if recompute else ours(x)
        y.square().sum().backward()
        gradients.append((x.grad, ours.weight.grad.clone()))
        if recompute:
            ours.float8_scales.update(keep)
    for found in gradients[1:2]:
        assert all(torch.equal(a, b) for a, b in zip(found, gradients[0], strict=True))


def test_a_saved_history_gives_the_same_rounding(tmp_path):
    one, other = layer(), layer()
    scales = one[0].float8_scales
    for _ in range(2):
        one[0](torch.randn(16, 64)).sum().backward()
        scales.update(keep)
    write_scales(scales, tmp_path)
    read_scales(other[0].float8_scales, tmp_path)
    x = torch.randn(16, 64)
    assert torch.equal(one[0](x), other[0](x))
    read_scales(other[0].float8_scales, tmp_path / "a checkpoint without float8")
    assert other[0].float8_scales.steps == 2


# ---- frozen weights


def lora(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def step_of(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**tiny_models.batch(rows=2, length=16)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_train_on_weights_that_exist_in_float8_only(checkpointed):
    exact = tiny_models.make("llama")
    ours = copy.deepcopy(exact)
    patch(ours)
    to_float8(ours)
    if checkpointed:
        checkpoint_layers(ours)
    exact, ours = lora(exact), lora(ours)
    assert hold_frozen_weights(ours) == 14
    frozen = [module for module in ours.modules() if isinstance(module, Float8Linear)]
    assert all(m.weight.dtype is E4M3 and m.weight.data_ptr() == m.float8_frozen.rows.data_ptr() for m in frozen)
    (loss, gradients), (truth, expected) = step_of(ours), step_of(exact)
    assert 1e-6 < abs(float(loss / truth) - 1) < 5e-3
    assert gradients.keys() == expected.keys()
    assert max(error(gradients[name], expected[name].double()) for name in expected) < 0.45
    scales_of(ours).update(keep)
    again, _ = step_of(ours)
    assert abs(float(again / truth) - 1) < 5e-3
