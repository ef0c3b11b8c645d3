"""Change the behaviour of one module instance: its `__class__` becomes a subclass made for it.

The subclass keeps `__name__`, `__qualname__` and `__module__`: transformers writes `architectures` from the name, reads
the class's source through its module, and looks classes up by `str(cls)`. What a patch has to know is stored on the
class (`patch_spec`) and nothing on the instance, so the state dict, hooks, `__dict__` and pickles stay as they were.

`observer_of` tells whether others see what goes in and out of a module. `rebuild_function` makes a function call other
functions without touching the module that defines it.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from operator import index
from typing import Any, SupportsIndex

from torch import Tensor, nn

from ligertune.patching.probe import Definition, definition_of


class ModulePatch(nn.Module):
    """Base of the mixins. The classes made by `patched_class` record what they replaced and what they were made of.

    A mixin stands before the class that it patches, so `super().forward` is the module's own forward.
    """

    patch_original: type
    patch_mixin: type
    patch_spec: Hashable

    @classmethod
    def class_body(cls, original: type, spec: Any) -> dict[str, Any]:
        """Return further members of the made class: those that depend on the class it replaces. spec: patch_spec."""
        return {}

    def gives_new_output(self, x: Tensor) -> bool:
        """Return whether the output of x is new memory that the backward does not need."""
        return False

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # The class cannot be found by its name, which is the original's: a pickle names the arguments of patched_class.
        # Protocols 0 and 1 would look the class up by that name; from 2 on the first entry is `__newobj__`.
        reduced = super().__reduce_ex__(max(index(protocol), 2))
        newobj = copyreg.__newobj__  # type: ignore[attr-defined]  # typeshed leaves it out
        if isinstance(reduced, str) or reduced[0] is not newobj:
            return reduced  # the original has its own way of pickling, from which it comes back unpatched
        made = type(self)
        if "patch_original" not in vars(made):
            return reduced  # FSDP2 has subclassed our class and pickles the module itself
        return (_new, (made.patch_original, made.patch_mixin, made.patch_spec), *reduced[2:])


def _new(original: type, mixin: type[ModulePatch], spec: Hashable) -> nn.Module:
    made = patched_class(original, mixin, spec)
    return made.__new__(made)


def patched_class(original: type, mixin: type[ModulePatch], spec: Hashable) -> type[nn.Module]:
    """Return the subclass of `original` with the behaviour of `mixin`.

    There is one per process and set of arguments, or one for each definition of `original` if the mixin depends on it.
    """
    depends = any("class_body" in vars(base) for base in mixin.__mro__ if base is not ModulePatch)
    key: type = mixin
    return _patched_class(original, key, spec, definition_of(original) if depends else ())


@functools.cache
def _patched_class(original: type, mixin: type[ModulePatch], spec: Hashable, definition: Definition) -> type:
    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "patch_original": original,
        "patch_mixin": mixin,
        "patch_spec": spec,
        **mixin.class_body(original, spec),
    }
    return type(original.__name__, (mixin, original), body)


def patch_module(module: nn.Module, mixin: type[ModulePatch], spec: Hashable = None) -> None:
    """Give `module` the behaviour of `mixin`. Raises ValueError if it is patched already."""
    if isinstance(module, ModulePatch):
        raise ValueError(f"{type(module).__name__} is patched already: unpatch it first")
    module.__class__ = patched_class(type(module), mixin, spec)


def unpatch_module(module: nn.Module) -> None:
    """Restore the class that `module` had before `patch_module`. Raises ValueError if it was wrapped since."""
    wrapper = wrapper_of(module)
    if wrapper is not None:
        raise ValueError(f"{type(module).__name__} was wrapped after it was patched ({wrapper}): take the wrapper off")
    assert isinstance(module, ModulePatch)  # or something would have wrapped it
    if _is_own(module, vars(module).get("forward")):
        del module.forward
    module.__class__ = type(module).patch_original


def wrapper_of(module: nn.Module) -> str | None:
    """Return what has wrapped a patched module since, so that its class cannot be restored; None if nothing has."""
    if "patch_original" not in vars(type(module)):
        return f"its class is {type(module).__name__} of {type(module).__module__}"
    replaced = "forward" in vars(module) and not _is_own(module, vars(module)["forward"])
    return "its forward was replaced on the instance" if replaced else None


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Return whether `forward` is the class's own, which accelerate leaves on the instance when its hooks go."""
    if not isinstance(forward, types.MethodType):
        return False
    return forward.__self__ is module and forward.__func__ is type(module).forward


# ---- observers of a module: hooks, or a forward set on the instance, that see its inputs and outputs

# Modules of wrappers that only provide a weight, and pass inputs and outputs on as they are: no observers.
WEIGHT_PROVIDERS = (
    "accelerate.",
    "deepspeed.",
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",  # `replicate`, which is DDP by hooks
    "torch.nn.utils.",
    "torch.utils.module_tracker",  # FLOP counters: it notes when a module begins and ends
)
HOOK_KINDS = {
    "forward hook": "_forward_hooks",
    "forward pre-hook": "_forward_pre_hooks",
    "backward hook": "_backward_hooks",
    "backward pre-hook": "_backward_pre_hooks",
}


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether hooks of `module`, or a forward set on the instance, see its inputs or outputs."""
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks or module._forward_pre_hooks) or "forward" in vars(module)


def observer_of(module: nn.Module) -> str | None:
    """Return what observes `module`, in words, or None."""
    for name in ("forward", "_old_forward"):  # accelerate's hooks keep the forward that they replace as the second
        forward = vars(module).get(name)
        if forward is not None and not _is_own(module, forward) and not _provides_weight(forward):
            return f"its forward was replaced by {_name(forward)}"
    for kind, hook in _hooks(module):
        if not _provides_weight(hook):
            return f"it has a {kind} ({_name(hook)})"
    return None


def _hooks(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    for kind, name in HOOK_KINDS.items():
        for hook in getattr(module, name).values():
            yield kind, hook
        for hook in getattr(nn.modules.module, f"_global{name}").values():
            yield f"global {kind}", hook
    added = getattr(module, "_hf_hook", None)  # accelerate's; several are combined in one `SequentialHook`
    for hook in getattr(added, "hooks", (added,) if added is not None else ()):
        yield "hook of accelerate", hook


def _provides_weight(function: Any) -> bool:
    return _origin(function).startswith(WEIGHT_PROVIDERS)


def _origin(function: Any) -> str:
    """Return the module that defines a function, the function of a partial or method, or an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__module__", None) or type(function).__module__


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)


# ---- functions rebuilt on other globals


def decorator_chain(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return a function's decorators, outermost first, and the function that they decorate.

    The list ends early, with a function that has `__wrapped__`, at a decorator that cannot be rebuilt: it has to be a
    Python function that closes over what it wraps.
    """
    chain = [function]
    while (wrapped := getattr(chain[-1], "__wrapped__", None)) is not None:
        cells = getattr(chain[-1], "__closure__", None) or ()
        if sum(cell.cell_contents is wrapped for cell in cells) != 1:
            break
        chain.append(wrapped)
    return chain


def names_in(code: types.CodeType) -> set[str]:
    """Return the globals and attributes that a function reads and the keywords of its calls, nested functions too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
        elif isinstance(constant, tuple):
            names |= {name for name in constant if isinstance(name, str)}
    return names


def rebuild_function(function: Callable[..., Any], replacements: Mapping[str, Any]) -> types.FunctionType:
    """Return the same function, decorators included, on a copy of its globals in which `replacements` are exchanged.

    `function` must have a `decorator_chain` that ends at a plain function. The copy of the globals has no `__name__`:
    torch.compile imports globals by module name where there is one, and would find the original ones; without a name it
    guards on the dictionary itself.
    """
    *decorators, innermost = decorator_chain(function)
    namespace = {name: value for name, value in innermost.__globals__.items() if name != "__name__"}
    namespace.update(replacements)
    rebuilt = _copy(innermost, namespace, innermost.__closure__)
    for decorator in reversed(decorators):
        cells = (
            types.CellType(rebuilt) if cell.cell_contents is decorator.__wrapped__ else cell
            for cell in decorator.__closure__
        )
        wrapped = rebuilt
        rebuilt = _copy(decorator, decorator.__globals__, tuple(cells))
        vars(rebuilt)["__wrapped__"] = wrapped
    return rebuilt


def _copy(
    function: Callable[..., Any], namespace: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    # A new code object: torch.compile stores graphs by code object, and one decorator's code serves many functions.
    code = function.__code__.replace()
    copied = types.FunctionType(code, namespace, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    del vars(copied)["__wrapped__"]  # update_wrapper sets it; `copied` does not call `function`
    return copied
