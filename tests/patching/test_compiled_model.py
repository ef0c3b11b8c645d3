"""torch.compile of a whole patched model over changing lengths: losses and number of graphs, as of an unpatched one."""

import copy
import threading

import pytest
import torch
from support.models import tiny_models
from torch._dynamo.testing import CompileCounterWithBackend

from ligertune.patching.patch import patch

LENGTHS = (24, 12, 17)
ALL_LENGTHS = (24, 12, 17, 33, 40, 9)
INDUCTOR_WORKS = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 makes C++ of the unpatched model that does not compile"
)


def in_new_thread(function):
    """Call `function` in a thread of its own: the state of patched models is fresh there, as in a new process."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    assert found, "the thread ended with an error"
    return found[0]


def train_compiled(model, lengths, backend="aot_eager", device="cpu", **options):
    """Return the number of graphs, and the losses and gradients of one step for each length."""
    torch._dynamo.reset()
    counter, steps = CompileCounterWithBackend(backend), []
    compiled = torch.compile(model, backend=counter, **options)
    for length in lengths:
        model.zero_grad()
        loss = compiled(**tiny_models.batch(length=length, device=device)).loss
        loss.backward()
        steps.append((loss.detach(), *(p.grad.clone() for p in model.parameters())))
    torch._dynamo.reset()
    return counter.frame_count, steps


@pytest.mark.slow
def test_a_compiled_model_takes_changing_lengths_in_a_fresh_thread():
    plain = tiny_models.make("gemma2", num_hidden_layers=1)
    patched = copy.deepcopy(plain)
    patch(patched)
    graphs, found = in_new_thread(lambda: train_compiled(patched, LENGTHS, fullgraph=True))
    assert graphs == 2  # one for the first length, one for all others
    for length, (loss, *gradients) in zip(LENGTHS, found, strict=True):
        plain.zero_grad()
        expected = plain(**tiny_models.batch(length=length)).loss
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "device", "tolerance"),
    [
        pytest.param("aot_eager", "cpu", 1e-5, marks=pytest.mark.slow),
        pytest.param("inductor", "cpu", 1e-5, marks=[pytest.mark.slow, INDUCTOR_WORKS]),
        pytest.param("inductor", "cuda", 1e-4, marks=pytest.mark.gpu),
    ],
)
def test_a_patched_model_makes_no_more_graphs_than_an_unpatched_one(backend, device, tolerance):
    plain = tiny_models.make("llama", num_hidden_layers=1).to(device)
    patched = copy.deepcopy(plain)
    patch(patched)
    expected_graphs, expected = in_new_thread(lambda: train_compiled(plain, ALL_LENGTHS, backend, device))
    graphs, found = in_new_thread(lambda: train_compiled(patched, ALL_LENGTHS, backend, device))
    assert graphs <= expected_graphs
    for (loss, *_), (expected_loss, *_) in zip(found, expected, strict=True):
        torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=0)
