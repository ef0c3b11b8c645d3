"""Make Triton's interpreter several times as quick, with the same results: it computes many things again each time.

It patches `triton.language` for every call of a device function, builds the types of blocks and tuples anew for each
operation, converts operands whose types agree, reduces element by element, and repeats integer operations in 64 bits
for an assertion that only Triton's debug mode makes. Products of float32 alone have other results, which do not depend
on the processor.
"""

import functools
import inspect
import math
from collections.abc import Callable

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

PATCHED = "_patched_for_the_interpreter"
_TRITONS_PRODUCT = interpreter.InterpreterBuilder.create_dot


def quicken() -> None:
    """Replace functions of the interpreter. The process then interprets only."""
    _patch_the_language_once()
    _remember_types()
    _leave_agreeing_operands()
    interpreter._patch_attr = _call_directly
    interpreter.TensorHandle.__post_init__ = lambda handle: None  # it compares sizes of types
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves
    interpreter.InterpreterBuilder.create_dot = _product
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _product(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Multiply float32 in float64 and round once, so that a result does not depend on the processor's BLAS."""
    if a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
        wide = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(wide.astype(np.float32), d.dtype.scalar)
    return _TRITONS_PRODUCT(self, a, b, d, input_precision, max_num_imprecise_acc)


def _patch_the_language_once() -> None:
    patch_language = interpreter._patch_lang

    @functools.cache
    def builtins_of(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    @functools.cache
    def languages_of(function: object) -> tuple[object, ...]:
        known = (interpreter.tl, core)
        return tuple({id(value): value for value in function.__globals__.values() if value in known}.values())

    def patch(package: object, builder: object, scope: object) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if core.is_builtin(member):  # otherwise the calling kernel has replaced it already
                interpreter._patch_attr(package, name, member, builder, scope)

    def patch_once(function: object) -> object:
        languages = languages_of(function)
        if languages and all(PATCHED in vars(language) for language in languages):
            return interpreter._LangPatchScope()  # the calling kernel has patched them, and will restore them
        scope = patch_language(function)
        for language in languages:
            scope.set_attr(language, PATCHED, True)
        return scope

    interpreter._patch_builtin, interpreter._patch_lang = patch, patch_once


def _remember_types() -> None:
    @functools.cache
    def shape_and_numel(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
        return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))

    def make_tensor(self: core.tensor, handle: object, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_numel(tuple(type.shape.values) if type.is_block() else ())

    blocks: dict[tuple, dict[str, object]] = {}
    make_new_block = core.block_type.__init__

    def make_block(self: core.block_type, element_ty: core.dtype, shape: object) -> None:
        key = element_ty.name, tuple(shape.values if isinstance(shape, core.tuple) else shape)
        if key not in blocks:
            make_new_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    broadcast_any = semantic.TritonSemantic.broadcast_impl_value

    def broadcast(self: object, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast_any(self, lhs, rhs)

    numpy_dtypes: dict[str, object] = {}
    numpy_dtype_of = interpreter._get_np_dtype

    def numpy_dtype(dtype: core.dtype) -> object:
        name = dtype.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype_of(dtype)
        return numpy_dtypes[name]

    unwrap_any = core._unwrap_if_constexpr
    values = frozenset({core.tensor, int, float, bool, str, type(None)})

    def unwrap(value: object) -> object:
        return value if type(value) in values else unwrap_any(value)

    core._unwrap_if_constexpr = unwrap
    core.tensor.__init__, core.block_type.__init__ = make_tensor, make_block
    semantic.TritonSemantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = numpy_dtype


def _leave_agreeing_operands() -> None:
    """Neither check nor convert operands whose types agree, and convert each number once."""
    convert_any = semantic.TritonSemantic.binary_op_type_checking_impl
    constants: dict[tuple, core.tensor] = {}

    def constant(semantics: semantic.TritonSemantic, number: int | float, like: core.tensor) -> core.tensor:
        shape = tuple(like.type.shape.values) if like.type.is_block() else ()
        key = type(number), number, like.dtype.name, shape
        if key not in constants:
            scalar = semantics.scalar_constant(number, like.dtype)
            constants[key] = semantics.splat(scalar, shape) if shape else scalar
            constants[key].handle.data.flags.writeable = False
        return constants[key]

    def convert(
        self: semantic.TritonSemantic,
        lhs: core.tensor | int | float,
        rhs: core.tensor | int | float,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[core.tensor, core.tensor]:
        if arithmetic_check and not div_or_mod:
            if isinstance(lhs, core.tensor) and _keeps_type(lhs, rhs):
                return lhs, constant(self, rhs, lhs)
            if isinstance(rhs, core.tensor) and _keeps_type(rhs, lhs):
                return constant(self, lhs, rhs), rhs
            if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor) and _agree(lhs.dtype, rhs.dtype):
                return self.broadcast_impl_value(lhs, rhs)
        return convert_any(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.TritonSemantic.binary_op_type_checking_impl = convert


def _keeps_type(tensor: core.tensor, number: object) -> bool:
    """Return whether an operation with the number has the tensor's type: Triton checks other numbers."""
    name = tensor.dtype.name
    if type(number) is int:
        return name in ("int32", "int64", "fp32") and -(2**31) <= number < 2**31
    return type(number) is float and name == "fp32"


def _agree(lhs: core.dtype, rhs: core.dtype) -> bool:
    """Return whether elements of these types are combined as they are: of one type, or a pointer and its offset."""
    if lhs.is_ptr():
        return rhs.name in ("int32", "int64")
    return lhs.name == rhs.name and not rhs.is_ptr()


def _call_directly(owner: object, name: str, member: Callable, builder: object, scope: object) -> None:
    """Replace a function of the language by one that interprets, without a wrapper that looks for `_semantic`."""
    function = inspect.unwrap(member)

    def call(*args: object, _semantic: object = None, **kwargs: object) -> object:
        return function(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

    scope.set_attr(owner, name, call)


def _reduce_by_halves(reduction: object, inputs: tuple[core.tensor, ...]) -> tuple[core.tensor, ...]:
    """Combine the halves of a power of two of elements until one is left, as a GPU does."""
    inputs, axis = reduction.unravel(inputs, reduction.axis)
    dtypes = [one.dtype for one in inputs]
    parts = [one.handle.data for one in inputs]
    while parts[0].shape[axis] > 1:
        halves = [np.split(part, 2, axis) for part in parts]
        left, right = (map(reduction.to_tensor, side, dtypes) for side in zip(*halves, strict=True))
        combined = reduction.combine_fn.fn(*left, *right)
        parts = [one.handle.data for one in (combined if isinstance(combined, tuple) else (combined,))]
    if not reduction.keep_dims:
        parts = [part.squeeze(axis) for part in parts]
    elif reduction.axis is None:
        raise NotImplementedError("keep_dims of a reduction over all axes: no kernel has one")
    return tuple(map(reduction.to_tensor, parts, dtypes))
