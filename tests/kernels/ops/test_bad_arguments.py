"""Mismatched arguments of every op: the error names them and what was expected."""

from functools import partial

import ligertune_kernels as kernels
import pytest
import torch

FP32, INT8, UINT8, INT32 = torch.float32, torch.int8, torch.uint8, torch.int32
ADAMW = kernels.AdamWOptions(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


def zeros(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def rope(
    k: tuple[int, ...] = (1, 1, 3, 8), cos: tuple[int, ...] = (1, 3, 8), needs_grad: bool = False, **options: object
) -> None:
    kernels.apply_rope(zeros(1, 2, 3, 8), zeros(*k), zeros(*cos).requires_grad_(needs_grad), zeros(*cos), **options)


def attend(k: int = 2, k_dtype: torch.dtype = FP32, places: torch.dtype = INT32, ends: int = 9, **options) -> None:
    q, k, v = zeros(9, 6, 16), zeros(9, k, 16, dtype=k_dtype), zeros(9, 2, 16)
    documents = kernels.Documents(zeros(9, dtype=places), torch.full((ends,), 9, dtype=INT32))
    kernels.document_attention(q, k, v, documents, **options)


def multiply(dtype: torch.dtype = INT8, n_inner: int = 8, **scales: torch.Tensor) -> None:
    kernels.int2_int8_matmul(zeros(2, n_inner, dtype=dtype), zeros(3, 2, dtype=UINT8), **scales)


LORA = kernels.ExpertLora(zeros(4, 2, 8), zeros(4, 9, 2))


def mix(
    index: torch.dtype = INT32, down: int = 5, bias: int = 10, lora: kernels.ExpertLora | None = None, **options: object
) -> None:
    hidden, weights, down = (zeros(*shape) for shape in ((2, 8), (2, 3), (4, 8, down)))
    gate_up = kernels.ExpertProjection(zeros(4, 10, 8), zeros(4, bias), lora)
    kernels.experts(hidden, zeros(2, 3, dtype=index), weights, gate_up, down, **options)


BAD = [
    (lambda: kernels.rms_norm(zeros(2, 8), zeros(7)), r"weight is \(7,\), but x is \(2, 8\)"),
    (lambda: kernels.rms_norm(zeros(2, 8), zeros(8), cast="olmo"), "'olmo'"),
    (lambda: kernels.rms_norm(zeros(2, 8), offset=1.0), "offset is 1.0, but there is no weight to add it to"),
    (lambda: kernels.layer_norm(zeros(2, 8), offset=1.0), r"offset is 1.0, but there is no weight to add it to"),
    (lambda: kernels.rms_norm(zeros(2, 8), zeros(8), cast="deepseek"), r"cast is 'deepseek', which takes no weight"),
    (lambda: kernels.add_rms_norm(zeros(2, 8), zeros(1, 8), zeros(8)), r"x is \(2, 8\), but residual is \(1, 8\)"),
    (lambda: kernels.add_rms_norm(zeros(2, 8), zeros(2, 8), zeros(7)), r"add_rms_norm: weight is \(7,\), but x is"),
    (lambda: kernels.layer_norm(zeros(2, 8), zeros(8), zeros(7)), r"bias is \(7,\), but x is \(2, 8\)"),
    (lambda: kernels.group_norm(zeros(2, 6, 5), 4), r"x is \(2, 6, 5\): expected \(N, C, \*\) with C a multiple of 4"),
    (lambda: kernels.group_norm(zeros(2, 6, 5), 3, zeros(5)), r"weight is \(5,\), but x is \(2, 6, 5\)"),
    (lambda: rope(k=(1, 1, 2, 8)), "only their heads may differ"),
    (lambda: rope(cos=(1, 2, 8)), r"expected \(1 or 1, 3, 8\)"),
    (lambda: rope(cos=(1, 3, 10)), "even number up to 8"),
    (lambda: rope(cos=(1, 3, 3), rotary_dim=8), "rotary_dim is 8"),
    (lambda: rope(deinterleave=True), "needs interleaved=True"),
    (lambda: rope(needs_grad=True), "get no gradient"),
    (lambda: attend(k=1), r"key \(9, 1, 16\), value \(9, 2, 16\); expected"),
    (lambda: attend(k_dtype=torch.float16), "expected one dtype"),
    (lambda: attend(places=torch.int64), "starts is torch.int64"),
    (lambda: attend(ends=8), "ends is"),
    *((lambda scale=scale: attend(scale=scale), "scale is") for scale in (0.0, -1.0)),
    (lambda: attend(window=0), "window is 0; expected at least 1"),
    (lambda: attend(softcap=0.0), "softcap is 0.0; expected a positive number"),
    (lambda: kernels.swiglu(zeros(2, 7)), "even last size"),
    (lambda: kernels.geglu(zeros(2, 8), zeros(2, 7)), r"geglu: gate is \(2, 8\)"),
    (lambda: kernels.geglu(zeros(2, 8), approximate="erf"), "'erf'"),
    (lambda: mix(index=FP32), r"expert_index is torch\.float32; expected integers"),
    (lambda: mix(down=6), r"experts: down is \(4, 8, 6\); expected \(X, 8, F\) = \(4, 8, 5\)"),
    (lambda: mix(bias=9), r"gate_up_bias is \(4, 9\); expected \(X, 2F\) = \(4, 10\)"),
    (lambda: mix(layout=kernels.ExpertLayout(transposed=True)), "for transposed weights"),
    (lambda: mix(lora=LORA), r"gate_up_b is \(4, 9, 2\); expected \(X, 2F, R1\) = \(4, 10, 2\)"),
    (lambda: mix(activation=kernels.GatedActivation("relu")), "'relu'; expected one of"),
    (lambda: mix(activation=kernels.GatedActivation(limit=0.0)), "limit is 0.0; expected a positive number"),
    (lambda: mix(activation=kernels.GatedActivation("gelu_erf", alpha=2.0)), "alpha is 2.0, but gelu_erf has none"),
    (lambda: mix(products="cublas"), "products is 'cublas'; expected one of"),
    (
        lambda: kernels.experts(zeros(2, 8), zeros(2, 3), zeros(2, 2), zeros(4, 10, 8), zeros(4, 8, 5)),
        r"expected \(\.\.\., E\)",
    ),
    (lambda: kernels.embedding(zeros(2), zeros(3, 4)), r"expected \(V, E\), and int32 or int64"),
    (lambda: kernels.embedding(zeros(2, dtype=INT32), zeros(3, 4), 3), "padding_idx is 3, but weight has 3 rows"),
    (lambda: multiply(dtype=FP32), r"x is torch\.float32"),
    (lambda: multiply(n_inner=4), r"expected \(\.\.\., K\) and \(N, K/4\)"),
    (lambda: multiply(x_scale=zeros(3)), r"x_scale is \(3,\); expected \(2,\)"),
    (lambda: multiply(weight_scale=zeros(2)), r"weight_scale is \(2,\); expected \(\) or \(3,\)"),
    (lambda: multiply(x_scale=zeros(2).requires_grad_()), "no backward"),
    (lambda: kernels.pack_int2(zeros(2, 6, dtype=INT8)), "the last size by 4"),
    (lambda: kernels.adamw_step(*[zeros(3)] * 3, zeros(4), ADAMW, step=1), "adamw_step: shapes"),
]

ROWS, WEIGHT, TAUGHT, TEACHER, LABELS = (zeros(*size) for size in ((2, 8), (5, 8), (2, 6), (5, 6), (2,)))
HEADS, LOW = "multi_head_linear_cross_entropy", zeros(5, 6, dtype=torch.bfloat16)

# loss, tensors, options, message
LOSSES = (
    ("cross_entropy", (ROWS, zeros(3)), {}, r"labels are \(3,\); expected \(2,\)"),
    ("cross_entropy", (ROWS, LABELS), {"reduction": "batchmean"}, "'batchmean'"),
    ("linear_cross_entropy", (ROWS, WEIGHT.T, LABELS), {}, r"expected weight \(V, E\)"),
    ("linear_cross_entropy", (ROWS, WEIGHT, LABELS[:1]), {}, r"labels are \(1,\)"),
    ("linear_cross_entropy", (TAUGHT, LOW, LABELS), {}, "expected the same"),
    ("linear_cross_entropy", (ROWS, WEIGHT, LABELS), {"reduction": "none", "num_items_in_batch": 1}, "divides a sum"),
    ("linear_cross_entropy", (ROWS, WEIGHT, LABELS, zeros(4)), {}, r"bias is \(4,\)"),
    ("linear_cross_entropy", (ROWS, WEIGHT, LABELS), {"lora": kernels.LinearLora(WEIGHT[:3], TEACHER)}, r"\(5, R\)"),
    ("linear_log_probs", (ROWS, WEIGHT, LABELS[:1]), {}, r"linear_log_probs: labels are \(1,\)"),
    ("linear_log_probs", (ROWS, WEIGHT, LABELS), {"lora": kernels.LinearLora(ROWS[:, :6], TEACHER)}, r"\(R, 8\)"),
    (HEADS, ([ROWS] * 3, WEIGHT, [LABELS] * 3, (1.0, 2.0)), {}, "3 hiddens, 3 labels and 2 coefficients"),
    (HEADS, ([ROWS] * 3, [WEIGHT] * 2, [LABELS] * 3, (1.0,) * 3), {}, "2 weights: expected one of each per head"),
    ("kl_div", (ROWS, zeros(8)), {}, r"input is \(2, 8\) and target \(8,\)"),
    ("kl_div", (ROWS, ROWS), {"reduction": "rows"}, "'rows'"),
    ("jsd", (ROWS, ROWS[:1]), {}, r"input is \(2, 8\) and target \(1, 8\)"),
    ("jsd", (ROWS, ROWS), {"labels": zeros(8)}, r"labels are \(8,\); expected \(2,\)"),
    ("jsd", (ROWS, ROWS), {"beta": 1.5}, r"beta is 1\.5"),
    ("jsd", (ROWS, ROWS), {"reduction": "batchmean"}, "'batchmean'"),
    ("jsd", (ROWS, ROWS.clone().requires_grad_()), {}, r"target\.detach\(\)"),
    ("linear_jsd", (ROWS, WEIGHT, TAUGHT, TEACHER.T), {}, r"teacher_hidden is .*expected weight \(V, E\)"),
    ("linear_jsd", (ROWS, WEIGHT, TAUGHT, TEACHER[1:]), {}, r"vocabulary of 5, the teacher \(2,\) of 4"),
    ("linear_jsd", (ROWS, WEIGHT, TAUGHT[1:], TEACHER), {}, r"rows \(2,\).*the teacher \(1,\)"),
    ("linear_jsd", (ROWS, WEIGHT, TAUGHT, TEACHER), {"labels": LABELS[:1]}, r"labels are \(1,\)"),
    ("linear_jsd", (ROWS, WEIGHT, TAUGHT, TEACHER), {"student_bias": zeros(4)}, r"student_bias is \(4,\)"),
    ("linear_jsd", (ROWS, WEIGHT, TAUGHT, LOW), {}, r"teacher_hidden is torch\.float32 and a parameter torch\.bf"),
    ("linear_jsd", (ROWS, WEIGHT, TAUGHT, TEACHER), {"temperature": 0}, "temperature is 0"),
    ("linear_jsd", (ROWS, WEIGHT, TAUGHT, TEACHER), {"beta": -1}, "beta is -1"),
)  # fmt: skip
BAD += [(partial(getattr(kernels, name), *tensors, **options), message) for name, tensors, options, message in LOSSES]


@pytest.mark.parametrize("call, message", BAD, ids=[message for _, message in BAD])
def test_mismatched_arguments_raise_an_error_that_names_them(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
