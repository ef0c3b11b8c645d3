"""DoRA and rsLoRA: on weights in 4 bits as PEFT alone, from a run to its export, and what the plan counts for them."""

import copy
import json

import peft
import pytest
import torch
from support.command_line import RECIPE, losses
from support.models import tiny_models
from support.models.merged_adapters import expect_logits_of_adapter
from support.quickstart_runs import plan_run, saves, train

from ligertune.models.shape import read_shape
from ligertune.models.trainable import apply_method
from ligertune.patching.patch import patch
from ligertune.planning.memory.activation_bytes import ActivationPolicy, layer_bytes
from ligertune.planning.options import MethodOptions

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")

DORA = {"method.use_dora": True, "method.use_rslora": True, "method.lora_r": 4}
QLORA = {
    **DORA, "method.type": "qlora", "model.model_name_or_path": RECIPE.parent / "stories260K",
    "model.dtype": "float32", "train.max_steps": 4, "train.learning_rate": 0.02, **saves(2),
}  # fmt: skip


def in_four_bits() -> torch.nn.Module:
    """Return a tiny model whose layers have bitsandbytes' 4-bit weights.

    On some CPUs bitsandbytes 0.50 reads them wrongly if the inputs are no multiple of 64, the size of a block.
    """
    model = tiny_models.make("llama", intermediate_size=128)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in [*parent.named_children()]:
                if isinstance(linear, torch.nn.Linear):
                    made = bitsandbytes.nn.Linear4bit(
                        linear.in_features,
                        linear.out_features,
                        bias=False,
                        quant_type="nf4",
                        compute_dtype=torch.float32,
                    )
                    made.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                    setattr(parent, name, made.to("cpu"))
    return model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "changes", [{"use_dora": True}, {"use_rslora": True}, {"use_dora": True, "use_rslora": True}], ids=str
)
def test_layers_in_four_bits_train_as_with_peft_alone(changes, fused):
    base = in_four_bits()
    targets = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **changes)
    method = MethodOptions(type="qlora", lora_r=4, lora_alpha=8, lora_target_modules=targets, **changes)
    found = []
    for ours in (False, True):
        model = copy.deepcopy(base)
        if ours:
            patch(model)
        adapted = apply_method(model, method, fused=fused) if ours else peft.get_peft_model(model, config)
        generator = torch.Generator().manual_seed(3)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name and "magnitude" not in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        loss = adapted.train()(**tiny_models.batch(), use_cache=False).loss
        loss.backward()
        found.append({"loss": loss.detach(), **{n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}})
    assert found[0].keys() == found[1].keys()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_in_four_bits_resumes_and_exports_what_peft_merges(tmp_path, ligertune):
    train(tmp_path / "first", **QLORA)
    run = tmp_path / "first" / "run"
    again = {"checkpoint.resume_from_checkpoint": run / "checkpoints" / "step-2"}
    train(tmp_path / "again", **QLORA, **again)
    assert losses(tmp_path / "again" / "run") == losses(run)[2:]
    done = ligertune("export", run, "--out", tmp_path / "merged", "--check", "--json")
    assert done.code == 0, done.err
    assert json.loads((run / "model" / "adapter_config.json").read_text("utf-8"))["use_dora"] is True
    expect_logits_of_adapter(tmp_path / "merged", run / "model")


def saved_elements(tokens: int, **changes: object) -> int:
    """Return the elements that the forward of two layers saves for the backward."""
    model = tiny_models.make("llama")
    patch(model)
    adapted = apply_method(model, MethodOptions(type="lora", lora_r=4, **changes)).train()
    ids = torch.randint(3, 100, (1, tokens))
    kept = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        adapted(input_ids=ids, labels=ids, use_cache=False)
    return sum(storage.nbytes() // 4 for storage in kept.values())


def test_the_plan_counts_the_products_that_dora_saves(tmp_path):
    per_token = [(saved_elements(128, **way) - saved_elements(64, **way)) // 64 for way in ({}, {"use_dora": True})]
    layer = read_shape(apply_method(tiny_models.make("llama"), MethodOptions(type="lora", use_dora=True))).layer
    usual, dora = (layer_bytes(layer, ActivationPolicy(dora=way), 4, 8) for way in (False, True))
    assert 2 * (dora - usual) == 4 * (per_token[1] - per_token[0]) > 0
    lora = {**DORA, "method.type": "lora", "model.dtype": "float32"}
    with_dora, without = (plan_run(tmp_path, **{**lora, "method.use_dora": way}).plan for way in (True, False))
    assert with_dora.memory.policy.dora and not without.memory.policy.dora
    assert with_dora.memory.workspace - without.memory.workspace == 3 * 4 * 172 * 64 + 600 * 8
    # three times the largest weight; a layer's magnitudes in the compute dtype, and their gradients
