"""Outputs of a patched model in training: their logits are computed when they are read, and cost nothing until then.

Such an output is an instance of a subclass of the model's own output class. `output.logits`, `output["logits"]`,
`output.get("logits")`, indices, slices, `to_tuple`, copies and pickles give tensors. `items` and `values` hand on what
is not computed yet: accelerate's mixed precision, DDP and pytrees go through all values of an output, and rebuild it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

from ligertune.patching.deferred_logits import DeferredLogits


class LazyOutput(ModelOutput):
    """Mixin of a ModelOutput class. model_output: that class."""

    model_output: type[ModelOutput]

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, slice):
            return tuple(self[name] for name in list(self)[key])
        if isinstance(key, int):
            return self[list(self)[key]]  # not through to_tuple, which would compute the logits for outputs[0]
        value = super().__getitem__(key)
        if isinstance(value, DeferredLogits):
            value = self[key] = value.materialise(f"outputs[{key!r}] is read")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        return self[key] if isinstance(value, DeferredLogits) else value

    def __reduce__(self) -> Any:
        # The class was made for this process: a pickle holds the model's own class, with computed logits.
        output: Any = self.model_output(**{name: self[name] for name in self})
        return output.__reduce__()


def _read(name: str) -> property:
    """Return a property for the field `name` that computes what is deferred."""

    def get(self: LazyOutput) -> Any:
        value = vars(self).get(name)
        return self[name] if isinstance(value, DeferredLogits) else value

    def put(self: LazyOutput, value: Any) -> None:
        vars(self)[name] = value

    return property(get, put)


@functools.cache
def _lazy_class(cls: type[ModelOutput], names: tuple[str, ...]) -> type[ModelOutput]:
    body: dict[str, Any] = {name: _read(name) for name in names}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "model_output": cls}
    return type(cls.__name__, (LazyOutput, cls), body)


class MissingLogits:
    """Stands for the logits that a compiled model does not return in training: using it says what to write."""

    _message = (
        "a compiled, patched model makes no logits in training; ligertune.patch(model, keep_logits=True) keeps them"
    )

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._message)

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(self._message)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(cls._message)


MISSING = MissingLogits()


def without_deferred(output: Any, *, compute: bool, readable: bool) -> Any:
    """Return a model's output without logits that are not computed: computed now, later if read, or None.

    compute: compute them now. readable: let them be read later; torch.compile cannot return them.
    """

    def settle(value: Any) -> Any:
        if not isinstance(value, DeferredLogits):
            return value
        if compute:
            return value.compute()
        if not readable:
            return None
        return MISSING if torch.compiler.is_compiling() else value.readable()

    if isinstance(output, tuple):
        return tuple(map(settle, output))
    # a new object: setting an attribute of a ModelOutput to None leaves its item in place
    cls: type = type(output)
    values = {name: settle(value) for name, value in output.items()}
    if torch.compiler.is_compiling():
        return cls(**values)
    later = tuple(name for name, value in values.items() if isinstance(value, DeferredLogits))
    return (_lazy_class(cls, later) if later else cls)(**values)
