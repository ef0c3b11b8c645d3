"""Operators of interpreted tensors in one call of numpy each, with the results of Triton's interpreter.

Triton converts and broadcasts both operands first and creates a type and a handle for each step. numpy broadcasts by
itself. An operator runs here if both operands have the same type, or the other operand is a number or an offset of a
pointer. All others run Triton's code.
"""

import functools
from collections.abc import Callable

import numpy as np
from triton.language import core
from triton.runtime import interpreter

FLOATS = frozenset({"fp16", "fp32", "fp64"})
INTEGERS = frozenset({"int32", "int64"})
NUMBERS = FLOATS | INTEGERS
# bfloat16 is stored as an integer, and int1 is not always stored as a bool
BITS = INTEGERS | {"int1"}
PRODUCTS = frozenset({"fp16", "fp32"})


def _quotient(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Divide integers and round towards zero."""
    return (left - np.fmod(left, right)) // right


# name of the method -> numpy's function, and the types that it computes as they are
ARITHMETIC = {
    "__add__": (np.add, NUMBERS),
    "__sub__": (np.subtract, NUMBERS),
    "__mul__": (np.multiply, NUMBERS),
    "__truediv__": (np.divide, frozenset({"fp32"})),
    "__floordiv__": (_quotient, INTEGERS),
    "__mod__": (np.fmod, INTEGERS),
    "__and__": (np.bitwise_and, BITS),
    "__or__": (np.bitwise_or, BITS),
    "__xor__": (np.bitwise_xor, BITS),
}
COMPARISONS = {
    "__lt__": (np.less, NUMBERS),
    "__le__": (np.less_equal, NUMBERS),
    "__gt__": (np.greater, NUMBERS),
    "__ge__": (np.greater_equal, NUMBERS),
    "__eq__": (np.equal, NUMBERS),
    "__ne__": (np.not_equal, NUMBERS),
}
ALL = slice(None)

_new_handle, _new_tensor = interpreter.TensorHandle.__new__, core.tensor.__new__
_joined: dict[tuple[int, int], tuple[core.dtype, core.dtype, core.dtype | None]] = {}
_constants: dict[tuple[type, float, str], np.ndarray] = {}
_indexed: dict[tuple[int, tuple[bool, ...]], tuple[core.dtype, core.dtype]] = {}


def quick_operator(name: str, triton_operator: Callable) -> Callable | None:
    """Return the quick method of tensors with this name, which calls Triton's where it does not apply; or None."""
    if name in ARITHMETIC:
        return _arithmetic(*ARITHMETIC[name], triton_operator, pointers=name == "__add__")
    reflected = name.replace("__r", "__", 1)
    if name.startswith("__r") and reflected in ARITHMETIC:
        return _reflected(*ARITHMETIC[reflected], triton_operator)
    if name in COMPARISONS:
        return _comparison(*COMPARISONS[name], triton_operator)
    if name == "__neg__":
        return _negative(triton_operator)
    return _getitem(triton_operator) if name == "__getitem__" else None


def quick_where(triton_where: Callable) -> Callable:
    """Return `tl.where` for two tensors of one type, or a tensor and a number."""

    def where(self: object, condition: core.tensor, x: object, y: object) -> core.tensor:
        swapped = type(x) is not core.tensor
        tensor, other = (y, x) if swapped else (x, y)
        if condition.dtype.name != "int1" or type(tensor) is not core.tensor:
            return triton_where(self, condition, x, y)
        data, result = _operand(tensor, other, NUMBERS)
        if result is None or result.scalar is not tensor.dtype:
            return triton_where(self, condition, x, y)
        result = joined_type(result, condition.type)
        if result is None:
            return triton_where(self, condition, x, y)
        chosen = (data, tensor.handle.data) if swapped else (tensor.handle.data, data)
        return tensor_of(np.where(condition.handle.data, *chosen), result)

    return where


def quick_product(triton_dot: Callable) -> Callable:
    """Return `tl.dot` for two matrices of one type, float16 or float32, with sums in float32.

    Other options change nothing here: the interpreter has one precision.
    """

    def dot(
        input: core.tensor, other: core.tensor, acc: core.tensor | None = None, *, out_dtype: object = core.float32,
        _semantic: object = None, **options: object,
    ) -> core.tensor:  # fmt: skip
        left, right = input.handle, other.handle
        plain = input.dtype.name in PRODUCTS and input.dtype.name == other.dtype.name and out_dtype is core.float32
        if not plain or left.data.ndim != 2 or right.data.ndim != 2 or left.data.shape[1] != right.data.shape[0]:
            return triton_dot(input, other, acc, out_dtype=out_dtype, **options)
        shape = left.data.shape[0], right.data.shape[1]
        start = _zeros(*shape) if acc is None else acc.handle
        if start.data.shape != shape or start.dtype.name != "fp32":
            return triton_dot(input, other, acc, out_dtype=out_dtype, **options)
        product = interpreter.interpreter_builder.create_dot(left, right, start, None, 0)
        return tensor_of(product.data, core.block_type(core.float32, list(shape)))

    return dot


@functools.cache
def _zeros(rows: int, columns: int) -> interpreter.TensorHandle:
    return interpreter.TensorHandle(np.zeros((rows, columns), np.float32), core.float32)


def keeps_type(tensor: core.tensor, number: object) -> bool:
    """Return whether an operation with the number has the tensor's type: Triton checks other numbers."""
    name = tensor.dtype.name
    if type(number) is int:
        return name in ("int32", "int64", "fp32") and -(2**31) <= number < 2**31
    return type(number) is float and name == "fp32"


def tensor_of(data: np.ndarray, type: core.dtype) -> core.tensor:
    """Return a tensor with this data and type."""
    handle, tensor = _new_handle(interpreter.TensorHandle), _new_tensor(core.tensor)
    handle.data, handle.dtype, handle.attr = data, type.scalar, {}
    tensor.handle, tensor.type, tensor.dtype = handle, type, handle.dtype
    tensor.shape, tensor.numel = type.tensor_shape
    return tensor


def _bool_like(type: core.dtype) -> core.dtype:
    return core.block_type(core.int1, type.shape) if type.is_block() else core.int1


def joined_type(left: core.dtype, right: core.dtype) -> core.dtype | None:
    """Return the type of left's elements in the shape that both broadcast to; None if they do not broadcast."""
    if left is right or not right.is_block():
        return left
    key = id(left), id(right)
    known = _joined.get(key)
    # other types may have had these ids before
    if known is None or known[0] is not left or known[1] is not right:
        known = _joined[key] = (left, right, _join(left, right))
    return known[2]


def _join(left: core.dtype, right: core.dtype) -> core.dtype | None:
    if not left.is_block():
        return right.with_element_ty(left)
    try:
        shape = np.broadcast_shapes(tuple(left.shape), tuple(right.shape))
    except ValueError:
        return None
    return left if shape == tuple(left.shape) else core.block_type(left.scalar, list(shape))


def _number(number: object, like: core.tensor) -> np.ndarray:
    """Return an array of one element of the tensor's type."""
    key = type(number), number, like.dtype.name
    if key not in _constants:
        # Triton makes +0 of both zeros
        _constants[key] = np.array([number or 0], interpreter._get_np_dtype(like.dtype))
        _constants[key].flags.writeable = False
    return _constants[key]


def _operand(tensor: core.tensor, other: object, names: frozenset[str]) -> tuple[np.ndarray | None, core.dtype | None]:
    """Return the other operand's data and the result's type; None where Triton's code has to run."""
    if tensor.dtype.name not in names:
        return None, None
    if type(other) is core.constexpr:
        other = other.value
    if type(other) is core.tensor:
        return _tensor_operand(tensor, other)
    return (_number(other, tensor), tensor.type) if keeps_type(tensor, other) else (None, None)


def _tensor_operand(tensor: core.tensor, other: core.tensor) -> tuple[np.ndarray | None, core.dtype | None]:
    data, names = other.handle.data, (tensor.dtype.name, other.dtype.name)
    if names[0] == names[1] and data.dtype is tensor.handle.data.dtype:
        return data, joined_type(tensor.type, other.type)
    if names == ("int32", "int64"):
        return data, joined_type(other.type, tensor.type)
    if names == ("int64", "int32"):
        return data, joined_type(tensor.type, other.type)
    return None, None


def _arithmetic(function: Callable, names: frozenset[str], triton_operator: Callable, *, pointers: bool) -> Callable:
    def operate(self: core.tensor, other: object, _semantic: object = None) -> core.tensor:
        data, result = _operand(self, other, names)
        if result is not None:
            return tensor_of(function(self.handle.data, data), result)
        if pointers and self.dtype.is_ptr() and type(other) is core.tensor and other.dtype.name in INTEGERS:
            result = joined_type(self.type, other.type)
            if result is not None:
                width = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
                offsets = width * other.handle.data.astype(np.uint64)
                return tensor_of(self.handle.data + offsets, result)
        return triton_operator(self, other)

    return operate


def _reflected(function: Callable, names: frozenset[str], triton_operator: Callable) -> Callable:
    def operate(self: core.tensor, other: object, _semantic: object = None) -> core.tensor:
        data, result = _operand(self, other, names)
        if result is None:
            return triton_operator(self, other)
        return tensor_of(function(data, self.handle.data), result)

    return operate


def _comparison(function: Callable, names: frozenset[str], triton_operator: Callable) -> Callable:
    def compare(self: core.tensor, other: object, _semantic: object = None) -> core.tensor:
        data, result = _operand(self, other, names)
        if result is None:
            return triton_operator(self, other)
        return tensor_of(function(self.handle.data, data), _bool_like(result))

    return compare


def _negative(triton_operator: Callable) -> Callable:
    def negative(self: core.tensor, _semantic: object = None) -> core.tensor:
        if self.dtype.name not in NUMBERS:
            return triton_operator(self)
        return tensor_of(_number(0, self) - self.handle.data, self.type)  # +0 for +0, as Triton

    return negative


def _getitem(triton_operator: Callable) -> Callable:
    """Index with `None` for a new dimension and `:` for one of the tensor's."""

    def index(self: core.tensor, slices: object, _semantic: object = None) -> core.tensor:
        if type(slices) is not tuple or not self.type.is_block() or any(s is not None and s != ALL for s in slices):
            return triton_operator(self, slices)
        added = tuple(s is None for s in slices)
        key = id(self.type), added
        known = _indexed.get(key)
        if known is None or known[0] is not self.type:
            result = triton_operator(self, slices)
            _indexed[key] = (self.type, result.type)
            return result
        return tensor_of(self.handle.data[slices], known[1])

    return index
