"""Make Triton's interpreter several times as quick, with the same results: it computes many things again each time.

It patches `triton.language` for every call of a device function, builds the types of blocks and tuples anew for each
operation, converts operands whose types agree, reduces element by element, and repeats integer operations in 64 bits
for an assertion that only Triton's debug mode makes. Products of float32 alone have other results, which do not depend
on the processor. quick_operators.py computes most operators in one call of numpy.
"""

import functools
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

from support.quick_operators import joined_type, keeps_type, quick_operator, quick_product, quick_where, tensor_of

PATCHED = "_patched_for_the_interpreter"
# Types between which numpy converts as the interpreter does.
CASTS = frozenset(
    [("fp16", "fp32"), ("fp32", "fp16"), ("int32", "int64"), ("int64", "int32"), ("int32", "fp32"), ("int1", "fp32"),
     ("fp32", "int32"), ("int1", "int32"), ("int64", "fp32"), ("int8", "fp32"), ("int8", "int32")]
)  # fmt: skip
# The interpreter stores bfloat16 as an integer, and cuts float32 off where it makes one of it.
KNOWN_CASTS = CASTS | {("bf16", "fp32"), ("fp32", "bf16")}
_TRITONS_PRODUCT = interpreter.InterpreterBuilder.create_dot


def quicken() -> None:
    """Replace functions of the interpreter. The process then interprets only."""
    _patch_the_language_once()
    _remember_types()
    _leave_agreeing_operands()
    _cast_with_numpy()
    _remember_numbers()
    _load_without_checks()
    _pass_arguments_as_they_are()
    interpreter._patch_attr = _call_directly
    interpreter.TensorHandle.__post_init__ = lambda handle: None  # it compares sizes of types
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves
    interpreter.InterpreterBuilder.create_dot = _product
    semantic.TritonSemantic.where = quick_where(semantic.TritonSemantic.where)
    inspect_arguments = functools.cache(inspect.getfullargspec)
    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getfullargspec": inspect_arguments})
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _product(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Multiply float32 in float64 and round once, so that a result does not depend on the processor's BLAS."""
    if a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
        wide = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(wide.astype(np.float32), d.dtype.scalar)
    return _TRITONS_PRODUCT(self, a, b, d, input_precision, max_num_imprecise_acc)


def _patch_the_language_once() -> None:
    """Patch a module of the language for the first kernel that uses it, and leave it so."""
    patch_language = interpreter._patch_lang

    @functools.cache
    def languages_of(function: object) -> tuple[object, ...]:
        known = (interpreter.tl, core)
        return tuple({id(value): value for value in function.__globals__.values() if value in known}.values())

    def patch_once(function: object) -> object:
        languages = languages_of(function)
        if not languages or not all(PATCHED in vars(language) for language in languages):
            patch_language(function)
            for language in languages:
                setattr(language, PATCHED, True)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _remember_types() -> None:
    # shape and number of elements of tensors of a type
    core.dtype.tensor_shape = core.tuple([]), core.constexpr(1)

    def make_tensor(self: core.tensor, handle: object, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.tensor_shape

    blocks: dict[tuple, core.block_type] = {}
    make_new_block = core.block_type.__init__

    def known_block(cls: type[core.block_type], element_ty: core.dtype, shape: object) -> core.block_type:
        """Return one object for each type, so that equal types are found by identity."""
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = element_ty.name, *[size.value if type(size) is core.constexpr else size for size in sizes]
        if key not in blocks:
            blocks[key] = object.__new__(cls)
            make_new_block(blocks[key], element_ty, shape)
            constants = core.tuple([core.constexpr(size) for size in key[1:]])
            blocks[key].tensor_shape = constants, core.constexpr(math.prod(key[1:]))
        return blocks[key]

    broadcast_any = semantic.TritonSemantic.broadcast_impl_value

    def broadcast(self: object, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
        if lhs.type.is_block() or rhs.type.is_block():
            left, right = joined_type(lhs.type, rhs.type), joined_type(rhs.type, lhs.type)
            if left is not None and right is not None:
                return _expanded(lhs, left), _expanded(rhs, right)
        return broadcast_any(self, lhs, rhs)

    equal_any = core.dtype.__eq__
    equal_any_blocks = core.block_type.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or equal_any(self, other)
    core.block_type.__eq__ = lambda self, other: self is other or equal_any_blocks(self, other)

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
    core.tensor.__init__ = make_tensor
    core.block_type.__new__, core.block_type.__init__ = known_block, lambda self, element_ty, shape: None
    semantic.TritonSemantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = numpy_dtype


def _cast_with_numpy() -> None:
    """Convert between the usual types in one call of numpy, and make each range once."""
    cast_any, range_any = semantic.TritonSemantic.cast, semantic.TritonSemantic.arange
    ranges: dict[tuple[int, int], core.tensor] = {}

    def cast(
        self: object, input: core.tensor, dst_ty: core.dtype, fp_downcast_rounding: str | None = None
    ) -> core.tensor:
        wanted = dst_ty.scalar
        if input.dtype.name == wanted.name:
            return input
        names = input.dtype.name, wanted.name
        if fp_downcast_rounding is not None or names not in KNOWN_CASTS:
            return cast_any(self, input, dst_ty, fp_downcast_rounding)
        data = input.handle.data
        if names in CASTS:
            converted = data.astype(interpreter._get_np_dtype(wanted))
        else:
            converted = _bfloat16_widened(data) if names[0] == "bf16" else _bfloat16_of(data)
            if converted is None:
                return cast_any(self, input, dst_ty)
        return tensor_of(converted, core.block_type(wanted, input.type.shape) if input.type.is_block() else wanted)

    def arange(self: object, start: int, end: int, *, ret_ty: core.dtype | None = None) -> core.tensor:
        if ret_ty is not None:
            return range_any(self, start, end, ret_ty=ret_ty)
        if (start, end) not in ranges:
            ranges[start, end] = range_any(self, start, end)
            ranges[start, end].handle.data.flags.writeable = False
        return ranges[start, end]

    semantic.TritonSemantic.cast, semantic.TritonSemantic.arange = cast, arange


def _bfloat16_widened(data: np.ndarray) -> np.ndarray | None:
    """Return float32 of the bits of bfloat16; None for subnormal numbers, which Triton converts in its own way."""
    magnitude = data & 0x7FFF
    if ((magnitude < 0x80) & (magnitude > 0)).any():
        return None
    return (data.astype(np.uint32) << 16).view(np.float32)


def _bfloat16_of(data: np.ndarray) -> np.ndarray | None:
    """Return the bits of bfloat16 of float32; None for subnormal numbers."""
    bits = data.view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    if ((magnitude < 0x800000) & (magnitude > 0)).any():
        return None
    return (bits >> 16).astype(np.uint16)


def _remember_numbers() -> None:
    """Make one tensor for each number that a kernel assigns."""
    to_any_tensor = semantic.TritonSemantic.to_tensor
    numbers: dict[tuple[type, float], core.tensor] = {}

    def to_tensor(self: object, x: object, check_type: bool = True) -> object:
        if type(x) is core.tensor:
            return x
        number = x.value if type(x) is core.constexpr else x
        if type(number) not in (int, float):
            return to_any_tensor(self, x, check_type)
        key = type(number), number
        if key not in numbers:
            numbers[key] = to_any_tensor(self, number)
            numbers[key].handle.data.flags.writeable = False
        return numbers[key]

    semantic.TritonSemantic.to_tensor = to_tensor


def _pass_arguments_as_they_are() -> None:
    """Launch on the tensors themselves, which are on the CPU.

    Triton makes a second tensor of each storage, in a function that refers to itself: the storages would stay alive
    until the next garbage collection.
    """
    executor = interpreter.GridExecutor
    copy_to_host, copy_back = executor._init_args_hst, executor._restore_args_dev

    def on_host(given: object) -> bool:
        return getattr(getattr(given, "device", None), "type", "cpu") == "cpu" and not isinstance(given, tuple)

    def arguments(self: object, args: tuple, kwargs: dict[str, object]) -> tuple[list, dict[str, object]]:
        if all(map(on_host, (*args, *kwargs.values()))):
            return list(args), dict(kwargs)
        return copy_to_host(self, args, kwargs)

    def restore(self: object, args: tuple, args_hst: list, kwargs: dict, kwargs_hst: dict) -> None:
        if not all(map(on_host, (*args, *kwargs.values()))):
            copy_back(self, args, args_hst, kwargs, kwargs_hst)

    executor._init_args_hst, executor._restore_args_dev = arguments, restore


def _load_without_checks() -> None:
    """Load a block of pointers with a mask, without options that these kernels do not use."""
    load_any = semantic.TritonSemantic._load_legacy

    def load(
        self: semantic.TritonSemantic, ptr: core.tensor, mask: core.tensor | None, other: core.tensor | None, *options
    ) -> core.tensor:
        boundary_check, padding = options[:2]
        element = ptr.dtype.element_ty if ptr.dtype.is_ptr() else None
        if mask is None or boundary_check or padding or not ptr.type.is_block() or element in (None, core.int1):
            return load_any(self, ptr, mask, other, *options)
        ptr, mask = self.broadcast_impl_value(ptr, mask)
        numpy_dtype = interpreter._get_np_dtype(element)
        if other is None:
            filled = np.zeros(ptr.handle.data.shape, numpy_dtype)
        else:
            ptr, other = self.broadcast_impl_value(ptr, other)
            filled = self.cast(other, element).handle.data
        data = interpreter._interpreter.load(ptr.handle.data, mask.handle.data, filled, numpy_dtype)
        return tensor_of(data, core.block_type(element, ptr.type.shape))

    semantic.TritonSemantic._load_legacy = load


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
            if isinstance(lhs, core.tensor) and keeps_type(lhs, rhs):
                return lhs, constant(self, rhs, lhs)
            if isinstance(rhs, core.tensor) and keeps_type(rhs, lhs):
                return constant(self, lhs, rhs), rhs
            if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor) and _agree(lhs.dtype, rhs.dtype):
                return self.broadcast_impl_value(lhs, rhs)
        return convert_any(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.TritonSemantic.binary_op_type_checking_impl = convert


def _expanded(tensor: core.tensor, type: core.dtype) -> core.tensor:
    """Return the tensor with its elements repeated to the shape of the type."""
    if tensor.type is type:
        return tensor
    data = np.empty(tuple(type.shape), tensor.handle.data.dtype)
    data[...] = tensor.handle.data
    return core.tensor(interpreter.TensorHandle(data, tensor.handle.dtype), type)


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

    quick = call
    if owner is core.tensor:
        quick = quick_operator(name, call) or call
    elif name == "dot":
        quick = quick_product(call)
    scope.set_attr(owner, name, quick)


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
