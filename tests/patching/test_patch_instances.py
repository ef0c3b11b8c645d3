"""Only the instance changes: classes, names, keys and saved files stay as they were, and `unpatch` restores."""

import copy
import functools
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from support.models import tiny_models
from transformers.models.llama import modeling_llama

from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.packing_checks import prepare_masks
from ligertune.patching.patch import AutoModelForCausalLM, patch, unpatch

ROOT = Path(__file__).resolve().parents[2]


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


def loss_of(model):
    return model(**tiny_models.batch()).loss


@pytest.fixture
def patched():
    model = tiny_models.make("llama")
    patch(model)
    return model


def test_names_keys_attributes_and_isinstance_stay():
    model = tiny_models.make("llama")
    before = classes(model)
    keys, attributes = list(model.state_dict()), {name: sorted(vars(m)) for name, m in model.named_modules()}
    patch(model)
    for name, module in model.named_modules():
        now, old = type(module), before[name]
        assert isinstance(module, old)
        assert all(getattr(now, part) == getattr(old, part) for part in ("__name__", "__qualname__", "__module__"))
    assert list(model.state_dict()) == keys
    assert {name: sorted(vars(m)) for name, m in model.named_modules()} == attributes


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_unpatch_restores_every_class_and_every_bit(family):
    model = tiny_models.make(family)
    before, loss = classes(model), loss_of(model)
    patch(model)
    assert classes(model) != before
    unpatch(model)
    assert classes(model) == before
    assert torch.equal(loss_of(model), loss)


def test_library_classes_and_other_models_are_not_touched():
    plain = tiny_models.make("llama")
    code = {name: vars(modeling_llama)[name] for name in ("LlamaRMSNorm", "apply_rotary_pos_emb")}
    owners = (modeling_llama.LlamaRMSNorm, modeling_llama.LlamaAttention, torch.nn.Linear)
    forwards = [cls.forward for cls in owners]
    before, loss, modules = classes(plain), loss_of(plain), set(sys.modules)
    other = tiny_models.make("llama")
    patch(other)
    loss_of(other)
    assert [name for name in set(sys.modules) - modules if "llama" in name] == []
    assert classes(plain) == before
    assert torch.equal(loss_of(plain), loss)
    assert {name: vars(modeling_llama)[name] for name in code} == code
    assert forwards == [cls.forward for cls in owners]


def test_no_module_of_transformers_is_changed():
    """Neither by `patch` nor by training with and without packing: the names of its modules and what they hold."""

    def held():
        modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformers"}
        return {name: {key: id(value) for key, value in vars(modules[name]).items()} for name in modules}

    model = tiny_models.make("llama")
    loss_of(model)  # transformers imports some of its modules at first use
    before, names = held(), set(sys.modules)
    patch(model, recompute=True)
    prepare_masks(model)
    loss_of(model).backward()
    assert held() == before
    assert set(sys.modules) == names


def test_unpatch_restores_all_but_the_modules_that_were_wrapped_since():
    model = tiny_models.make("llama")
    before, loss = classes(model), loss_of(model)
    patch(model)
    wrapped = model.model.layers[0].mlp
    wrapped.__class__ = type("Wrapped", (type(wrapped),), {})  # as FSDP2 does
    replaced = model.model.norm
    replaced.forward = functools.partial(replaced.forward)  # as accelerate's hooks do
    left = ("model.layers.0.mlp", "model.norm")
    with pytest.warns(UserWarning, match="unpatch: 2 modules stayed patched.*model.layers.0.mlp: its class is Wrapped"):
        assert unpatch(model) == left
    assert {name for name, cls in classes(model).items() if cls is not before[name]} == set(left)
    torch.testing.assert_close(loss_of(model), loss, rtol=1e-5, atol=0)
    wrapped.__class__ = type(wrapped).__bases__[0]
    del replaced.forward
    assert unpatch(model) == ()
    assert classes(model) == before
    assert torch.equal(loss_of(model), loss)


def test_unpatch_after_accelerate_has_added_and_removed_its_hooks():
    model = tiny_models.make("llama")
    before, loss, attributes = classes(model), loss_of(model), {name: set(vars(m)) for name, m in model.named_modules()}
    patch(model)
    add_hook_to_module(model, ModelHook(), append=True)
    add_hook_to_module(model.model.norm, ModelHook())
    remove_hook_from_module(model, recurse=True)
    assert unpatch(model) == ()
    assert classes(model) == before
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert torch.equal(loss_of(model), loss)


def test_patching_twice_changes_nothing_and_is_reported(patched):
    before = classes(patched)
    report = patch(patched)
    assert classes(patched) == before
    expected = [(count, 0, f"{count} patched before") for count in (2, 5, 2, 1)]
    assert [(row.applied, row.left, row.note) for row in report.rows] == expected


def test_another_loss_needs_unpatch_first(patched):
    with pytest.raises(ValueError, match="unpatch it"):
        patch(patched, loss="torch")
    unpatch(patched)
    assert patch(patched, loss="cross_entropy").rows[-1].kernel == "cross_entropy"


@pytest.mark.filterwarnings("ignore:the loss is computed from materialised logits")
def test_hooks_stay():
    seen = []
    model = tiny_models.make("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    model.model.norm.register_forward_hook(lambda module, args, output: seen.append("norm"))
    patch(model)
    loss_of(model)
    model(tiny_models.batch()["input_ids"])
    assert seen == 2 * ["norm", (2, 24, tiny_models.VOCAB)]


def test_deepcopy_is_patched_and_independent(patched):
    twin = copy.deepcopy(patched)
    assert classes(twin) == classes(patched)
    assert torch.equal(loss_of(twin), loss_of(patched))
    unpatch(twin)
    assert type(twin) is modeling_llama.LlamaForCausalLM
    assert type(patched) is not modeling_llama.LlamaForCausalLM


@pytest.mark.slow
def test_pickle_comes_back_patched_in_another_process(patched, tmp_path):
    stored = tmp_path / "model.pkl"
    stored.write_bytes(pickle.dumps((patched, loss_of(patched).item())))
    code = (
        "import pickle, sys; sys.path.insert(0, 'tests'); from support.models import tiny_models\n"
        f"model, loss = pickle.load(open({str(stored)!r}, 'rb'))\n"
        "from ligertune.patching.patch import patch\n"
        "assert model(**tiny_models.batch()).loss.item() == loss\n"
        "print([row.note for row in patch(model).rows])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([f"{n} patched before" for n in (2, 5, 2, 1)])


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_pickle_and_torch_save_keep_the_patch(patched, protocol):
    assert classes(pickle.loads(pickle.dumps(patched, protocol))) == classes(patched)
    stored = io.BytesIO()
    torch.save(patched, stored)
    stored.seek(0)
    assert classes(torch.load(stored, weights_only=False)) == classes(patched)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gemma2", "mixtral"])
def test_saved_files_are_those_of_the_unpatched_model(family, tmp_path):
    plain = tiny_models.make(family)
    model = copy.deepcopy(plain)
    patch(model)
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "patched")
    assert json.loads((tmp_path / "patched/config.json").read_text())["architectures"] == [type(plain).__name__]
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "patched" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "patched").train()
    assert torch.equal(loss_of(loaded), loss_of(plain))


def test_auto_model_loads_and_patches(tmp_path):
    plain = tiny_models.make("llama")
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    loaded(**tiny_models.batch())
    assert loss_counts(loaded).fused == 1
    torch.testing.assert_close(loss_of(loaded), loss_of(plain), rtol=1e-5, atol=0)
    keeping = AutoModelForCausalLM.from_pretrained(tmp_path, keep_logits=True).train()
    assert keeping(**tiny_models.batch()).logits.ndim == 3
    built = AutoModelForCausalLM.from_config(plain.config)
    assert [row.note for row in patch(built).rows] == [f"{n} patched before" for n in (2, 5, 2, 1)]


def test_a_class_made_from_a_patched_one_works_unpatched(patched):
    fresh = type(patched)(patched.config)  # as code that calls model.__class__(config) does
    fresh.load_state_dict(patched.state_dict())
    with pytest.warns(UserWarning, match="materialised logits"):
        torch.testing.assert_close(loss_of(fresh.train()), loss_of(patched), rtol=1e-5, atol=0)


def test_gradients_flow_through_a_frozen_and_a_shared_model(patched):
    reference = copy.deepcopy(patched).requires_grad_(False)
    patched.lm_head.requires_grad_(False)
    loss_of(patched).backward()
    assert patched.lm_head.weight.grad is None
    assert patched.model.norm.weight.grad is not None
    assert not loss_of(reference).requires_grad
