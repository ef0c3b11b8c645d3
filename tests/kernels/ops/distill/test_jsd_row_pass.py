"""Row pass of linear_jsd against float64: huge, infinite, equal and nearly equal logits, NaN."""

import pytest
import torch
from ligertune_kernels.ops.distill.kernels import JSDOptions, jsd_row_pass

BETAS = (0.0, 0.1, 0.5, 1.0)
VOCAB, WIDTH = 700, 704  # with columns past the vocabulary
LOSS, GRADIENT = 2e-6, 4e-7  # tolerances of fp32; the gradient relative to the largest, if that exceeds 1


def both(student, teacher, beta, temperature=1.0):
    """Yield losses and gradients in fp32, then in float64, of the same logits."""
    options = JSDOptions(beta, temperature)
    for dtype in (torch.float32, torch.float64):
        logits = [t.to(dtype) for t in (student, teacher)]
        gradient = torch.full_like(logits[0], 7.0)
        scale = torch.ones((), dtype=dtype, device=student.device)
        losses = jsd_row_pass(*logits, None, options, vocab_size=VOCAB, gradient=gradient, scale=scale)
        assert not gradient[losses.isfinite(), VOCAB:].any()
        yield losses.double(), gradient[:, :VOCAB].double()


def logits(device, spread: float = 3.0) -> list[torch.Tensor]:
    return [spread * torch.randn(5, WIDTH, device=device) for _ in range(2)]


def assert_agrees(student, teacher, beta, *, temperature=1.0, times=1.0) -> None:
    (losses, gradient), (true_losses, true_gradient) = both(student, teacher, beta, temperature)
    torch.testing.assert_close(losses, true_losses, rtol=2e-6, atol=times * LOSS)
    unit = max(1.0, true_gradient.abs().max().item())
    torch.testing.assert_close(gradient, true_gradient, rtol=1e-5, atol=times * GRADIENT * unit)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "spread, temperature, times",
    [
        pytest.param(3.0, 1.0, 2.0, id="as logits are"),
        pytest.param(3.0, 0.3, 5.0, id="sharp"),
        pytest.param(40.0, 2.0, 20.0, id="far apart: the last digit of a logit is 8e-6"),
        pytest.param(1e-3, 1.0, 1.0, id="all but equal"),
    ],
)
def test_agrees_where_student_and_teacher_are_close_and_far(spread, temperature, times, beta, device) -> None:
    assert_agrees(*logits(device, spread), beta, temperature=temperature, times=times)


@pytest.mark.parametrize("beta", BETAS)
def test_a_constant_added_to_all_logits_changes_nothing(beta, device) -> None:
    student, teacher = ((16.0 * t).round() / 16.0 for t in logits(device))  # adding 1000 is then exact
    (losses, gradient), _ = both(student, teacher, beta)
    (moved, moved_gradient), _ = both(student + 1000.0, teacher - 500.0, beta)
    torch.testing.assert_close(moved, losses, rtol=0, atol=LOSS)
    torch.testing.assert_close(moved_gradient, gradient, rtol=0, atol=GRADIENT)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_logits_have_no_divergence(beta, device) -> None:
    student, _ = logits(device)
    (losses, gradient), _ = both(student, student.clone(), beta)
    assert losses.abs().max() <= 1e-6 and gradient.abs().max() <= 1e-6


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_columns_of_probability_zero_add_what_the_other_model_gives(beta, device) -> None:
    """A teacher cut down to its top columns, a student with some at -inf, and columns at -inf in both."""
    student, teacher = logits(device)
    teacher[:, 3:600] = student[:, 500:650] = float("-inf")
    assert_agrees(student, teacher, beta)
    student[:, 100] = teacher[:, 650] = -3e4  # underflows, too
    assert_agrees(student, teacher, beta)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("which", [0, 1], ids=["student", "teacher"])
def test_nan_stays_in_its_row(which, beta, device) -> None:
    pair = logits(device)
    pair[which][2, 5] = float("nan")
    (losses, gradient), _ = both(*pair, beta)
    assert losses.isnan().tolist() == [False, False, True, False, False]
    assert gradient[2].isnan().any() and not gradient[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_lose_only_their_rounding(dtype, device) -> None:
    """On NVIDIA they use an approximate logarithm."""
    student, teacher = (t.to(dtype) for t in logits(device))
    gradient, scale = torch.empty_like(student), torch.ones((), device=device)
    options = JSDOptions(0.5, 1.0)
    losses = jsd_row_pass(student, teacher, None, options, vocab_size=VOCAB, gradient=gradient, scale=scale)
    _, (true_losses, true_gradient) = both(student, teacher, 0.5)
    torch.testing.assert_close(losses.double(), true_losses, rtol=2e-6, atol=LOSS)
    rounding = torch.finfo(dtype).eps  # the interpreter cuts bfloat16 off
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(gradient[:, :VOCAB].double(), true_gradient, rtol=rounding, atol=GRADIENT + least)
