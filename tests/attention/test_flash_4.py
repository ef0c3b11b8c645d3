"""FlashAttention-4 in rows of long documents, with a stand-in for its package that attends with torch on a CPU."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_attention_choice import H100, MI300, choose

from ligertune.attention import flash_4
from ligertune.attention.choice import installed
from ligertune.attention.packed_documents import WindowMask, flash_4_or_kernel, kernel_attention
from ligertune.errors import UserError

CHOSEN = "fa4_or_document_attention"
STAND_IN = """
import torch
from torch.nn.functional import scaled_dot_product_attention
CALLS = []
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    assert cu_seqlens_q.dtype is torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k) and causal
    lengths = cu_seqlens_q.diff().tolist()
    assert max(lengths) == max_seqlen_q == max_seqlen_k
    CALLS.append(lengths)
    rows = zip(*(t.transpose(0, 1)[None].split(lengths, 2) for t in (q, k, v)))
    out = [scaled_dot_product_attention(*row, is_causal=True, scale=softmax_scale, enable_gqa=True) for row in rows]
    return torch.cat(out, 2)[0].transpose(0, 1), None
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the stand-in: its distribution and its module."""
    flash_4._function.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(STAND_IN)
    (tmp_path / "flash_attn_4-4.0.0.dist-info").mkdir()
    (tmp_path / "flash_attn_4-4.0.0.dist-info" / "METADATA").write_text("Name: flash-attn-4\nVersion: 4.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    flash_4._function.cache_clear()


AUTO = {"own_kernel": "auto", "deterministic": False, "head_dim": 64}


def test_auto_takes_it_where_gradients_may_differ_from_run_to_run(package):
    assert choose(**AUTO).implementation == CHOSEN
    for change in ({"deterministic": True}, {"few_shapes": True}, {"own_kernel": True}):
        assert choose(**AUTO | change).implementation == "document_attention"
    assert choose(**AUTO | {"own_kernel": False}).implementation == "varlen"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"family": "gemma2"}, "it has no soft cap"),
        ({"head_dim": 96}, "its heads are 64 or 128 wide, and the model's are 96"),
    ],
)
def test_auto_says_why_it_takes_our_kernels_instead(package, change, reason):
    choice = choose(**AUTO | change)
    assert choice.implementation == "document_attention"
    assert f"flash_attention_4: {reason}" in choice.why


@pytest.mark.skipif(installed(flash_4.PACKAGE), reason=f"{flash_4.PACKAGE} is installed")
def test_it_is_not_taken_where_it_is_not_installed():
    choice = choose(**AUTO)
    assert choice.implementation == "document_attention"
    assert "flash_attention_4: the package flash-attn-4 is not installed" in choice.why


def test_the_recipe_can_name_it(package):
    wanted = {"wanted": "flash_attention_4", "head_dim": 128}
    assert choose(**wanted, deterministic=False).implementation == CHOSEN
    assert choose(**wanted, deterministic=False, packing=False).implementation == "flash_attention_4"
    refused = [
        ({}, "differ from run to run, and train.full_determinism is true"),
        ({"deterministic": False, "few_shapes": True}, "train.torch_compile and train.cuda_graphs do not run it"),
        ({"machine": MI300}, "NVIDIA GPUs only"),
    ]
    for change, reason in refused:
        with pytest.raises(UserError, match=rf"attn_implementation: flash_attention_4 cannot be used: .*{reason}"):
            choose(**wanted | change)


@pytest.mark.skipif(installed("flash-attn"), reason="flash-attn is installed")
def test_its_package_is_not_that_of_flash_attention_2(package):
    """Both have modules in the folder flash_attn."""
    with pytest.raises(UserError, match="the package flash-attn is not installed"):
        choose("flash_attention_2")
    assert choose(machine=replace(H100, arch="sm100"), family="gemma2").implementation == "flex_attention"


def row_of(lengths, width, dtype=torch.bfloat16, key_heads=1):
    torch.manual_seed(0)
    sizes = ((1, heads, sum(lengths), width) for heads in (2, key_heads, key_heads))
    tensors = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    places = torch.stack([t.repeat_interleave(torch.tensor(lengths)) for t in (bounds[:-1], bounds[1:])]).int()
    keywords = {"document_places": places, "document_lengths": lengths, "max_length_q": max(lengths)}
    return tensors, keywords | {"cu_seq_lens_q": bounds.int(), "cu_seq_lens_k": bounds.int()}


@pytest.mark.parametrize(
    ("lengths", "width", "change", "taken"),
    [
        ((2100, 2000), 64, {}, True),
        ((2048,), 128, {"scaling": 0.3}, True),
        ((2047,), 64, {}, False),  # short
        ((2048,), 32, {}, False),  # no heads that it was measured for
        ((2048,), 64, {"softcap": 5.0}, False),
        ((2048,), 64, {"sliding_window": 100}, False),
    ],
)
def test_rows_of_long_documents_run_it_and_others_our_kernels(package, lengths, width, change, taken):
    tensors, keywords = row_of(lengths, width)
    mask = WindowMask(change["sliding_window"]) if "sliding_window" in change else None
    results = []
    for attend in (flash_4_or_kernel, kernel_attention):
        out, _ = attend(torch.nn.Identity(), *tensors, mask, **keywords, **change)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    calls = importlib.import_module("flash_attn.cute").CALLS
    assert calls == ([list(lengths)] if taken else [])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).float().norm() < 1e-2 * expected.float().norm()


def test_a_broken_installation_is_one_sentence(package):
    (package / "flash_attn" / "cute" / "__init__.py").write_text("import missing_package_of_flash_attn")
    tensors, keywords = row_of((2048,), 64)
    with pytest.raises(UserError, match=r"flash-attn-4 is installed, and cannot be imported: .*missing_package"):
        flash_4_or_kernel(torch.nn.Identity(), *tensors, None, **keywords)


def test_rows_whose_sums_would_not_fit_run_our_kernels():
    def taken(n_tokens, width, heads=32, key_heads=8, dtype=torch.bfloat16):
        query, key, value = (
            torch.empty(n_tokens, n, width, dtype=dtype, device="meta") for n in (heads, key_heads, key_heads)
        )
        return flash_4.takes(query, key, value, documents=1)

    assert taken(65536, 128)  # 1.5 GiB: dq of 32 heads, dk and dv of 8
    assert not taken(65537, 128)
    assert taken(98304, 128, heads=32, key_heads=32)  # nothing shares dk and dv
    assert not taken(4096, 128, dtype=torch.float32)
