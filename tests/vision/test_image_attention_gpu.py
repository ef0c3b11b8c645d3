"""Attention within images in one launch, and bfloat16 training of vision-language models on a GPU."""

from __future__ import annotations

import copy

import pytest
import tiny_vlms
import torch
from image_batches import batch_of, image_row, training

from ligertune.attention.image_attention import per_image_attention
from ligertune.patching.patch import patch
from ligertune.planning.options import VisionOptions
from ligertune.vision.families import prepare_vision

LENGTHS = (4, 64, 256, 1020)  # a blank image, small ones, one that ends within a block


def attend(tensors, lengths):
    """Return (out, dq, dk, dv) of images of these lengths, concatenated to (1, H, S, D)."""
    leaves = [t.detach().requires_grad_(True) for t in tensors]
    bounds = torch.tensor([0, *lengths], device=leaves[0].device).cumsum(0).to(torch.int32)
    out, _ = per_image_attention(torch.nn.Identity(), *leaves, None, scaling=0.1, cu_seq_lens_q=bounds)
    out.backward(torch.cos(torch.arange(out.numel(), device=out.device)).view_as(out).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64, 80])  # 80: Qwen2-VL's
def test_one_launch_equals_a_loop_over_images(head_dim):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, 4, sum(LENGTHS), head_dim)
    truth = [torch.randn(shape, device="cuda", generator=generator) for _ in range(3)]
    half = [t.bfloat16() for t in truth]
    for found, expected in zip(attend(half, LENGTHS), attend([t.float() for t in half], LENGTHS), strict=True):
        assert (found.float() - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_an_image_attends_to_itself_only():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3)]
    together = attend(tensors, (4, 16))
    alone = attend([t[:, :, 4:] for t in tensors], (16,))
    torch.testing.assert_close(together[0][:, 4:], alone[0])


@pytest.mark.gpu
@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_bfloat16_training_with_kernels_is_as_close_to_fp32_as_without(
    family, prepared_for, image_paths, tokenizer_of, reader_of
):
    rows = prepared_for(
        family, [image_row("<image>What is this?", "a red system", image_paths[c]) for c in ("red", "blue")]
    )
    batch = {name: value.cuda() for name, value in batch_of(rows, reader_of(family), (0, 1)).items()}
    exact = tiny_vlms.make(family, tokenizer_of(family)).cuda()
    prepare_vision(exact, VisionOptions(freeze_vision_tower=False, freeze_projector=False))
    _, truth = training(exact, batch)
    errors = []
    for patched in (True, False):
        model = copy.deepcopy(exact)
        if patched:
            patch(model)
        _, found = training(model.bfloat16(), batch)
        off = sum((found[name].float() - truth[name]).square().sum() for name in truth)
        errors.append(float((off / sum(gradient.square().sum() for gradient in truth.values())).sqrt()))
    assert errors[0] <= 1.25 * errors[1] + 2e-3
