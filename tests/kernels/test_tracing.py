"""Results that torch.compile takes as constants: in the way of the installed torch, and in that of torch 2.11."""

from collections.abc import Callable, Iterator

import pytest
import torch
from ligertune_kernels.tracing import constant_while_tracing, through_comptime
from torch import Tensor, nn

WAYS = {"of this version": constant_while_tracing, "of torch 2.11": through_comptime}


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def value_at_zero() -> Callable:
    """Return a new function each time: torch marks the function itself."""

    def value(module: "Activation", factor: int) -> float:
        return float(module.function(torch.zeros(()))) * factor  # float() of a traced tensor would break the graph

    return value


class Activation(nn.Module):
    """x times the value of an activation at 0: 0 for silu, 0.5 for a sigmoid."""

    def __init__(self, function: nn.Module, constant: Callable) -> None:
        super().__init__()
        self.function, self.constant = function, constant

    def forward(self, x: Tensor) -> Tensor:
        return x * self.constant(self, 2)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_result_is_a_constant_of_one_graph(way):
    constant = way(value_at_zero())
    model = nn.Sequential(Activation(nn.Sigmoid(), constant), Activation(nn.Softplus(), constant))
    x = torch.randn(5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(model(x), x * 2 * torch.log(torch.tensor(2.0)))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_another_module_does_not_run_the_graph_of_the_first(way):
    constant, x = way(value_at_zero()), torch.randn(5)
    compiled = torch.compile(Activation.forward, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for function, factor in ((nn.Sigmoid(), 1.0), (nn.SiLU(), 0.0)):
            torch.testing.assert_close(compiled(Activation(function, constant), x), factor * x)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_error_of_the_function_names_its_cause(way):
    def refuse(module: nn.Module, factor: int) -> float:
        raise ValueError(f"no value for {type(module).__name__} times {factor}")

    model = Activation(nn.SiLU(), way(refuse))
    with pytest.raises(ValueError, match="no value for Activation times 2"):
        model(torch.ones(1))
    with pytest.raises(Exception, match="no value for Activation times 2"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(1))
