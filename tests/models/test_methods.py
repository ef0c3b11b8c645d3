"""Fine-tuning methods: which parameters train, and that patched models compute what plain ones do under each."""

import copy
import warnings

import peft
import pytest
import torch
from support.covering import every_pair
from support.models import tiny_models
from support.same_training import assert_same_training

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.errors import UserError
from ligertune.models import trainable
from ligertune.models.trainable import apply_method
from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions

WITH_HEAD = ["q_proj", "v_proj", "lm_head"]
METHODS = {
    "full": {},
    "lora": {"type": "lora", "lora_r": 4},
    "dora": {"type": "lora", "lora_r": 4, "use_dora": True, "lora_target_modules": ["o_proj"]},
    "rslora": {"type": "lora", "lora_r": 4, "use_rslora": True, "lora_target_modules": ["o_proj"]},
    "freeze": {"type": "freeze", "trainable": [r"layers\.1\."]},
    "lora with the head": {"type": "lora", "lora_r": 4, "lora_target_modules": WITH_HEAD},
    "lora and a trained head": {"type": "lora", "lora_r": 4, "lora_modules_to_save": ["lm_head"]},
}


def pair(method: dict, family: str = "llama", *, checkpointing: bool | str = False, device: str = "cpu"):
    """Return (patched, plain) models with the same method and random adapters."""
    plain = tiny_models.make(family).to(device)
    patched = copy.deepcopy(plain)
    patch(patched)
    made = []
    for model in (patched, plain):
        if checkpointing:
            checkpoint_layers(model, checkpointing)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            made.append(apply_method(model, MethodOptions(**method)).train())
    generator = torch.Generator().manual_seed(3)
    for copied, parameter in zip(*(model.parameters() for model in made), strict=True):
        if parameter.requires_grad and method.get("type") == "lora":
            parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).to(device)
            copied.data = parameter.data.clone()
    return made


@pytest.mark.parametrize(
    "method, family, checkpointing",
    every_pair([*METHODS], ["llama", "gemma2", "phi3", "mixtral", "llama_tied"], [False, True]),
)
def test_patched_and_plain_models_train_alike(method, family, checkpointing):
    if "head" in method and family != "llama":
        pytest.skip("one family is enough for the head")
    patched, plain = pair(METHODS[method], family, checkpointing=checkpointing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_training(patched, plain, tiny_models.batch(), num_items_in_batch=31)
    assert (loss_counts(patched).fused, loss_counts(patched).materialised.total()) == (1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True, "offload", "offload_gate"], ids=str)
@pytest.mark.parametrize("method", ["full", "lora", "lora with the head", "freeze"])
def test_kernels_that_overwrite_their_inputs_train_alike(method, checkpointing):
    """On a GPU rotary and gated kernels overwrite inputs, but none that an adapter or a recomputation reads."""
    patched, plain = pair(METHODS[method], checkpointing=checkpointing, device="cuda")
    batch = tiny_models.batch(rows=3, length=37, device="cuda")
    assert_same_training(patched, plain, batch, tolerance=3e-5, num_items_in_batch=31)


def test_an_adapted_head_makes_logits_only_if_peft_comes_after_patch():
    """The caller uses peft without `apply_method`."""
    for targets, fused, layers in ((["q_proj"], 1, 2), (WITH_HEAD, 0, 5)):
        plain = peft.get_peft_model(tiny_models.make("llama"), peft.LoraConfig(r=4, target_modules=targets)).train()
        inside = copy.deepcopy(plain)
        outside = tiny_models.make("llama")
        assert [row.applied for row in patch(inside).rows] == [2, 5, 2, layers, 1]
        patch(outside)
        outside = peft.get_peft_model(outside, peft.LoraConfig(r=4, target_modules=targets)).train()
        outside.load_state_dict(plain.state_dict())
        assert_same_training(inside, plain, tiny_models.batch())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert_same_training(outside, plain, tiny_models.batch())
        assert loss_counts(inside).fused == 1
        assert loss_counts(outside).fused == fused
        assert any("materialised logits" in str(one.message) for one in said) == (fused == 0)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_dropout": 0.5}], ids=["DoRA", "dropout"])
def test_a_head_adapter_beyond_low_rank_materialises_logits_with_a_warning(changes):
    patched, plain = pair({**METHODS["lora with the head"], **changes})
    with pytest.warns(UserWarning, match="materialised logits"):
        torch.manual_seed(5)
        loss = patched(**tiny_models.batch()).loss
    torch.manual_seed(5)
    torch.testing.assert_close(loss, plain(**tiny_models.batch()).loss)
    assert loss_counts(patched).fused == 0


def test_logits_of_an_adapted_head_in_evaluation_and_after_merging():
    patched, plain = (model.eval() for model in pair(METHODS["lora with the head"]))
    batch = tiny_models.batch()
    with torch.no_grad():
        for inputs in (batch, {"input_ids": batch["input_ids"][:1, :5]}):
            torch.testing.assert_close(patched(**inputs).logits, plain(**inputs).logits)
        before = patched(batch["input_ids"]).logits
        merged = patched.merge_and_unload()
        torch.testing.assert_close(merged(batch["input_ids"]).logits, before, rtol=1e-4, atol=1e-4)
    assert not isinstance(merged, peft.PeftModel)


def test_trainable_parameters_by_method():
    frozen = MethodOptions(type="freeze", trainable=["lm_head", r"model\.norm\.weight$"])
    model = apply_method(tiny_models.make("llama"), frozen)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names == {"lm_head.weight", "model.norm.weight"}
    with_head = MethodOptions(type="lora", lora_r=3, lora_modules_to_save=["lm_head"])
    adapted = apply_method(tiny_models.make("llama"), with_head)
    names = {name.removeprefix("base_model.model.") for name, p in adapted.named_parameters() if p.requires_grad}
    assert len([name for name in names if ".lora_" in name]) == 2 * 7 * 2  # A and B of seven layers in two blocks
    assert {name for name in names if ".lora_" not in name} == {"lm_head.modules_to_save.default.weight"}
    assert adapted.peft_config["default"].r == 3


def test_initial_adapters_depend_on_the_seed_only():
    first, again, other = (
        apply_method(tiny_models.make("llama"), MethodOptions(type="lora"), seed=seed).state_dict()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [({}, 2.0), ({"lora_alpha": 8.0}, 0.5), ({"lora_r": 64}, 0.5), ({"use_rslora": True}, 8.0)],
    ids=["default", "alpha", "r", "rslora"],
)
def test_the_scale_of_an_adapter(changes, scaling):
    adapted = apply_method(tiny_models.make("llama"), MethodOptions(type="lora", **changes))
    assert adapted.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] == scaling


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"type": "lora", "lora_target_modules": ["q_porj"]}, ["lora_target_modules", "q_porj", "q_proj?", "gate_"]),
        ({"type": "lora", "lora_modules_to_save": ["lm_heat"]}, ["lora_modules_to_save", "lm_heat", "lm_head?"]),
        ({"type": "freeze", "trainable": ["layers.7"]}, ["method.trainable", "layers.7", "model.embed_tokens.weight"]),
    ],
    ids=["target", "saved", "pattern"],
)
def test_unknown_names_are_refused(method, words):
    with pytest.raises(UserError) as caught:
        apply_method(tiny_models.make("llama"), MethodOptions(**method))
    assert all(word in str(caught.value) for word in words)


def test_an_expression_that_takes_exponential_time_is_refused(monkeypatch):
    monkeypatch.setattr(trainable, "MATCH_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"method.trainable: matching .* takes more than 0.2 s"):
        apply_method(tiny_models.make("llama"), MethodOptions(type="freeze", trainable=[r"(?:(\w|.)+[!?])+"]))


def test_adapters_of_a_model_without_weights_need_no_memory():
    with torch.device("meta"):
        model = tiny_models.make("llama")
    adapted = apply_method(model, MethodOptions(type="lora", lora_r=2**16))
    assert {parameter.device.type for parameter in adapted.parameters()} == {"meta"}


def test_an_adapter_on_a_tied_head_is_refused():
    with pytest.raises(UserError, match="shares its weight"):
        apply_method(tiny_models.make("llama_tied"), MethodOptions(type="lora", lora_target_modules=["lm_head"]))


def test_adapters_of_a_bfloat16_model_are_float32_and_compute_in_bfloat16():
    model = tiny_models.make("llama").to(torch.bfloat16)
    patch(model)
    adapted = apply_method(model, MethodOptions(type="lora", lora_r=4))
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}
    dtypes = []
    layer = adapted.base_model.model.model.layers[0].mlp.up_proj
    layer.lora_A["default"].register_forward_hook(lambda module, args, out: dtypes.append((args[0].dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = adapted(**tiny_models.batch(), use_cache=False).loss
    loss.backward()
    assert dtypes == [(torch.bfloat16, torch.bfloat16)]
    assert all(p.grad.dtype is torch.float32 for p in adapted.parameters() if p.requires_grad)
