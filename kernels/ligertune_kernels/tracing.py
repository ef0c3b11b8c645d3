"""Results that torch.compile takes as constants although they depend on a module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")


def constant_while_tracing(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of a module and constants: torch.compile calls it while it traces, and keeps the result.

    A graph holds for the module it was traced with: another module is traced again. Where nothing is traced, the
    function runs as it is.
    """
    if torch.__version__ >= (2, 12):
        return torch.compiler.assume_constant_result(function)
    return through_comptime(function)


def through_comptime(function: Callable[..., T]) -> Callable[..., T]:
    """Do the work of the decorator for torch 2.11, whose assume_constant_result refuses modules as arguments."""

    @functools.wraps(function)
    def call(module: nn.Module, *arguments: object) -> T:
        if not torch.compiler.is_compiling():
            return function(module, *arguments)
        from torch._dynamo.comptime import comptime

        called = function  # _call_now finds it among the local variables of this frame
        comptime(_call_now)
        _ = called, id(module)  # the tracer guards an id: the graph holds for this module alone
        return _result()

    return call


_results: list[Any] = []  # at most one: the result of the last call


def _call_now(context: Any) -> None:
    """Call the decorated function with the module itself. The tracer sees the module inside an object of its own."""
    module, function, arguments = (context.get_local(name) for name in ("module", "called", "arguments"))
    traced = module._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    _results[:] = [function.as_python_constant()(traced.value, *arguments.as_python_constant())]


@torch.compiler.assume_constant_result
def _result() -> Any:
    return _results.pop()
