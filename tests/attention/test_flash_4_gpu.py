"""FlashAttention-4 on a Hopper GPU: gradients, memory, and a run of long documents that takes it."""

import json
import shutil

import pytest
import torch
from ligertune_kernels import Documents, document_attention_reference
from support.command_line import RECIPE, losses
from support.quickstart_runs import train
from test_flash_4 import row_of

from ligertune.attention import flash_4
from ligertune.attention.choice import installed
from ligertune.attention.packed_documents import flash_4_or_kernel
from ligertune.planning.memory.layer_bytes import flash_4_memory


def can_run() -> bool:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return hopper and installed(flash_4.PACKAGE)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not can_run(), reason=f"needs {flash_4.PACKAGE} and an H100")]


@pytest.mark.parametrize("width", flash_4.LONG)
@pytest.mark.parametrize("lengths", [(2048, 2500, 1600), (4099,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_and_gradients_are_those_of_float64(width, lengths, dtype):
    flash_4._function.cache_clear()
    tensors, keywords = row_of(lengths, width, dtype)
    tensors = [t.detach().cuda().requires_grad_() for t in tensors]
    keywords |= {name: value.cuda() for name, value in keywords.items() if isinstance(value, torch.Tensor)}
    out, _ = flash_4_or_kernel(torch.nn.Identity(), *tensors, None, **keywords, scaling=0.1)
    gradient = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, tensors, gradient)]
    assert flash_4._function.cache_info().currsize, "it ran our kernels"
    leaves = [t.detach().double()[0].transpose(0, 1).requires_grad_() for t in tensors]
    expected = document_attention_reference(*leaves, Documents(*keywords["document_places"]), scale=0.1)
    gradients = torch.autograd.grad(expected, leaves, gradient[0].double())
    pairs = zip(found, [expected[None], *(g.transpose(0, 1)[None] for g in gradients)], strict=True)
    for one, other in pairs:
        assert (one.double() - other).norm() < (4e-3 if dtype is torch.bfloat16 else 1e-3) * other.norm()


@pytest.mark.parametrize("key_heads", [8, 32])
def test_the_backward_needs_the_memory_that_is_planned(key_heads):
    n_tokens, heads, width = 16384, 32, 128
    sizes = ((n_tokens, n, width) for n in (heads, key_heads, key_heads))
    tensors = [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    bounds = torch.tensor([0, n_tokens], dtype=torch.int32, device="cuda")
    out = flash_4.flash_4(*tensors, bounds, n_tokens, scale=None)
    gradient = torch.randn_like(out)
    torch.autograd.grad(out, tensors, gradient, retain_graph=True)  # compiles
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = torch.autograd.grad(out, tensors, gradient)
    peak = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in found)
    planned = flash_4_memory(n_tokens, heads, key_heads, width)
    assert 0.8 * planned < peak < 1.05 * planned + (8 << 20)


def test_a_run_of_long_documents_has_the_losses_of_our_kernels(tmp_path):
    model = shutil.copytree(RECIPE.parent / "stories260K", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    (model / "config.json").write_text(json.dumps(config))
    texts = [{"text": f"{i} " + "the ship sailed on and on " * 600} for i in range(24)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    settings = {
        "model.model_name_or_path": model,
        "model.init": "random",
        "model.dtype": "bfloat16",
        "data.datasets.0.path": tmp_path / "long.jsonl",
        "data.datasets.0.format": "text",
        "data.packing": True,
        "data.max_length": 8192,
        "data.on_overlength": "truncate",
        "data.val_split": 0,
        "train.per_device_train_batch_size": 1,
        "train.max_steps": 4,
    }
    flash_4._function.cache_clear()
    train(tmp_path / "ours", **settings)
    assert not flash_4._function.cache_info().currsize
    train(tmp_path / "flash", **settings, **{"train.full_determinism": False})  # auto takes it
    assert flash_4._function.cache_info().currsize
    found, expected = (losses(tmp_path / name / "run") for name in ("flash", "ours"))
    assert len(found) == 4 and found == pytest.approx(expected, rel=1e-2)
