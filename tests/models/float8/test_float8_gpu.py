"""Float8 on a GPU: losses of ten steps of a Llama of width 2048 against bfloat16."""

from importlib.util import find_spec

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.errors import UserError
from ligertune.hardware import this_machine
from ligertune.models.compile import compile_layers
from ligertune.models.float8.float8_layers import to_float8, to_torchao_float8
from ligertune.models.float8.float8_linear import scales_of
from ligertune.patching.patch import patch
from ligertune.planning.precision import check_float8
from ligertune.recipe import Recipe

pytestmark = pytest.mark.gpu
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install torchao")
TORCHAO = [(True, False, False), (False, False, False), (True, True, False), (True, False, True), (True, True, True)]
STEPS, VOCAB = 10, 8192
BOUND = 0.01  # relative error of a step's loss; emulated at half the width it is 0.001


@pytest.fixture(scope="module", autouse=True)
def multiplies_in_float8() -> None:
    needed = {"model": {"model_name_or_path": "m"}, "data": {"datasets": [{"path": "d"}]}}
    fp8 = Recipe.model_validate({**needed, "checkpoint": {"output_dir": "o"}, "train": {"fp8": True}})
    try:
        check_float8(fp8, this_machine())
    except UserError as problem:
        pytest.skip(str(problem))


def llama(*, patched: bool) -> PreTrainedModel:
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=VOCAB,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
    if patched:
        patch(model)
    return model


def curve(model: PreTrainedModel) -> Tensor:
    """Return the losses of STEPS steps on rows of 256 tokens that repeat a sequence."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        ids = torch.randint(VOCAB // 16, (4, 64), generator=generator).repeat(1, 4).cuda()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if (scales := scales_of(model)) is not None:
            scales.update(lambda amax: amax)
        found.append(loss.detach())
    return torch.stack(found).cpu()


@pytest.fixture(scope="module")
def exact() -> dict[bool, Tensor]:
    """Losses in bfloat16 by whether our kernels run."""
    return {patched: curve(llama(patched=patched)) for patched in (True, False)}


@pytest.mark.parametrize(
    ("convert", "patched", "compiled", "checkpointed"),
    [
        (to_float8, True, False, False),
        (to_float8, False, False, False),
        (to_float8, True, False, True),
        *(pytest.param(to_torchao_float8, *how, marks=needs_torchao) for how in TORCHAO),
    ],
)
def test_losses_are_close_to_bfloat16(convert, patched, compiled, checkpointed, exact):
    model = llama(patched=patched)
    if compiled:
        compile_layers(model)
    convert(model)
    if checkpointed:
        checkpoint_layers(model, compiled=compiled)
    found = curve(model)
    assert torch.isfinite(found).all() and found[-1] < found[0]
    print(f"furthest from bfloat16: {float(((found - exact[patched]) / exact[patched]).abs().max()):.1e}")
    torch.testing.assert_close(found, exact[patched], rtol=BOUND, atol=0)
    assert not torch.equal(found, exact[patched])


def test_float8_mlps_have_the_losses_of_their_layers_alone():
    fused, separate = llama(patched=True), llama(patched=True)
    for model in (fused, separate):
        to_float8(model)
    for layer in separate.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda *args: None)  # an MLP with hooks calls its layers
    assert torch.equal(curve(fused), curve(separate))


@pytest.mark.parametrize("convert", [to_float8, pytest.param(to_torchao_float8, marks=needs_torchao)])
def test_a_float8_model_generates(convert):
    """Products then have one row; only the weight's gradient needs a multiple of 16."""
    model = llama(patched=True).eval()
    convert(model)
    prompt = torch.arange(3, 10, device="cuda")[None]
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    assert written.shape == (1, 12)
