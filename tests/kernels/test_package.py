"""The kernel package: public names, cost of importing it, operation without triton, row views."""

import re
import subprocess
import sys
from pathlib import Path

import ligertune_kernels
import pytest
import torch
from ligertune_kernels import launcher
from ligertune_kernels.chips import Chip
from ligertune_kernels.table import OPS

CDNA = Chip("amd", "gfx942", warp_size=64, processors=304, l2_bytes=4 << 20)

EXPORTS = (
    "AdamWOptions AddRMSNorm CrossEntropyLoss Documents Embedding ExpertLayout ExpertLora ExpertProjection "
    "Float8Blocks Float8Copies GatedActivation GatedRMSNorm GeGLU GroupNorm JSDLoss KLDivLoss LayerNorm "
    "LinearCrossEntropyLoss LinearJSDLoss LinearLora MultiHeadLoss Mxfp4 Nf4 RMSNorm ReGLU Schedule SwiGLU "
    "SwigluFloat8Gradients TokenLogProbs TokenStatistics adamw_step add_rms_norm apply_rope backend causal_conv1d "
    "causal_conv1d_step cross_entropy decode_attention dequantize_float8_blocks dequantize_mxfp4 dequantize_nf4 "
    "divergence_workspace document_attention document_attention_memory document_attention_with_lse draw_seed "
    "embedding experts gated_delta_rule gated_delta_rule_step gated_delta_rule_with_states gated_rms_norm geglu "
    "group_norm int2_int8_matmul jsd kda kda_step kda_with_states kl_div labelled_rows layer_norm "
    "linear_cross_entropy linear_jsd linear_log_probs linear_token_statistics log_probs_memory merge_own_keys "
    "multi_head_linear_cross_entropy nf4_bytes pack_int2 quantize_float8 quantize_float8_blocks quantize_mxfp4 "
    "quantize_nf4 reglu rms_norm runs_triton sample_tokens schedule_of seeded_dropout ssd ssd_step ssd_with_states "
    "swiglu swiglu_float8 swiglu_float8_backward unpack_int2"
)


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_exports_are_pinned_and_exist() -> None:
    expected = sorted([*EXPORTS.split(), *(f"{op.name}_reference" for op in OPS)])
    assert ligertune_kernels.__all__ == expected
    assert all(getattr(ligertune_kernels, name).__name__ == name for name in expected)
    with pytest.raises(AttributeError, match="no attribute 'rmsnorm'"):
        _ = ligertune_kernels.rmsnorm


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_table_rows_name_what_the_op_files_define(op) -> None:
    function = getattr(ligertune_kernels, op.name)
    assert function.__module__ == op.module
    assert set(op.inputs) <= set(function.__code__.co_varnames[: function.__code__.co_argcount])


def test_import_loads_neither_torch_nor_triton() -> None:
    assert python("import sys, ligertune_kernels; print({'torch', 'triton'} & set(sys.modules))") == "set()"


@pytest.mark.skipif(not launcher.TRITON_INSTALLED, reason="needs triton")
def test_meta_tensors_run_as_a_chip_inside_the_context() -> None:
    t = torch.empty(2, device="meta")
    with launcher.meta_runs_as(CDNA):
        assert launcher.runs_triton(t) and launcher.chip_of(t.device) is CDNA
    assert not launcher.runs_triton(t)


def test_rows_are_views_where_strides_allow() -> None:
    packed = torch.zeros(3, 4, 20)
    half = launcher.as_rows(packed[..., 10:])
    assert half.shape == (12, 10) and half.stride() == (20, 1) and half._base is not None
    assert launcher.as_rows(packed[..., ::2]).stride() == (10, 1)


def test_no_kernel_reads_the_type_of_an_unspecialised_number() -> None:
    """torch.compile analyses kernels with plain numbers; where that fails, it treats all inputs as overwritten."""
    sources = [path.read_text(encoding="utf-8") for path in Path(ligertune_kernels.__file__).parent.rglob("*.py")]
    numbers = {name for source in sources for names in re.findall(r"do_not_specialize=\[([^]]*)", source)
               for name in re.findall(r"\w+", names)}  # fmt: skip
    assert "n_rows" in numbers
    reads = re.compile(rf"\b({'|'.join(sorted(numbers))}|\w+_stride)\.(dtype|to\()")
    assert [found.group() for source in sources for found in reads.finditer(source)] == []
