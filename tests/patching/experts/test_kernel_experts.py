"""Experts computed by the op in all that a trainer does with a model, patched and as `experts_implementation`."""

import copy
import functools
import io

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.forked_ranks import on_ranks
from support.models import tiny_models
from support.models.moe_families import eager_model, experts_of, with_implementation
from support.models.tiny_families import inputs_of, tiny_family
from support.same_training import assert_same, assert_same_training, losses_and_gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from transformers.distributed import DistributedConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import ligertune
from ligertune.errors import UserError
from ligertune.patching.experts.kernel_experts import KernelExperts, experts_forward
from ligertune.patching.patch import patch, unpatch

WAYS = ("patched", "registered")


def computed_by_op(way, model):
    """Return a copy of a model whose experts the op computes, and nothing else."""
    ours = copy.deepcopy(model)
    if way == "registered":
        ligertune.register_experts()
        return with_implementation(ours, "ligertune")
    patch(ours, rope=False, norm=False, loss="torch")
    assert all(isinstance(module, KernelExperts) for module in experts_of(ours))
    return ours


@pytest.fixture(scope="module")
def plain():
    return eager_model("causal", "qwen3_moe")


def train(model, folder, *, checkpointing=False):
    """Return the losses of three steps of transformers' Trainer."""
    batch = {name: value.tolist() for name, value in inputs_of("qwen3_moe").items()}
    arguments = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, save_strategy="no",
        report_to="none", seed=3, use_cpu=True, disable_tqdm=True, gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Dataset.from_dict(batch), data_collator=default_data_collator)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_trainer_has_the_losses_of_the_eager_experts(way, checkpointing, plain, tmp_path):
    expected = train(copy.deepcopy(plain), tmp_path)
    assert expected[0] > expected[-1]
    assert train(computed_by_op(way, plain), tmp_path, checkpointing=checkpointing) == pytest.approx(expected, rel=1e-4)


def test_models_load_with_the_registered_implementation(plain, tmp_path):
    """It is not stored with the model: others load it as before."""
    ligertune.register_experts()
    computed_by_op("registered", plain).save_pretrained(tmp_path)
    assert "ligertune" not in (tmp_path / "config.json").read_text()
    batch = inputs_of("qwen3_moe")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="ligertune").train()
    assert loaded.config._experts_implementation == "ligertune"
    assert_same_training(loaded, plain, batch)
    ours = ligertune.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="ligertune")
    assert all(isinstance(module, KernelExperts) for module in experts_of(ours))
    loaded.set_experts_implementation("eager")
    assert torch.equal(loaded(**batch).loss, plain(**batch).loss)


@pytest.mark.parametrize("way", WAYS)
def test_copies_and_stored_models_compute_the_same(way, plain):
    model = computed_by_op(way, plain)
    batch = inputs_of("qwen3_moe")
    expected = model(**batch).loss
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(twin(**batch).loss, expected)
    if way == "patched":
        assert not unpatch(model)
        assert torch.equal(model(**batch).loss, plain(**batch).loss)


@pytest.mark.parametrize("way", WAYS)
def test_generation_gives_the_tokens_of_the_eager_experts(way, plain):
    prompt = inputs_of("qwen3_moe")["input_ids"][:, :6]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found, expected = (model.eval().generate(prompt, **settings) for model in (computed_by_op(way, plain), plain))
    plain.train()
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_computes_the_same(way):
    """Recognition happens while the first forward is traced."""
    plain = with_implementation(tiny_models.make("mixtral", num_hidden_layers=1), "eager")
    torch._dynamo.reset()
    compiled = torch.compile(computed_by_op(way, plain), backend="aot_eager")
    for length in (24, 12):
        batch = tiny_models.batch(length=length)
        found = losses_and_gradients(compiled, batch)
        gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in found[1].items()}
        assert_same((found[0], gradients), losses_and_gradients(plain, batch))
    torch._dynamo.reset()


@pytest.mark.parametrize("way", WAYS)
def test_autocast_is_as_close_to_float32_as_with_eager_experts(way, plain):
    batch = inputs_of("qwen3_moe")
    truth = plain(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (model(**batch).loss for model in (computed_by_op(way, plain), plain))
    assert (found - truth).abs() <= (expected - truth).abs() + 1e-3 * truth


def test_another_index_than_an_experts_adds_nothing():
    """Expert parallelism of transformers sends the tokens of other ranks' experts to index X."""
    experts = experts_of(tiny_family("causal", "mixtral"))[0]
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    index = torch.tensor([[0, 1], [4, 1], [0, 4], [4, 4], [2, 3]])
    experts.config._experts_implementation_internal, experts._is_expert_parallel = "grouped_mm", True
    expected = experts(x, index, weights.masked_fill(index == 4, 0.0))
    assert not expected[3].any()
    torch.testing.assert_close(experts_forward(experts, x, index, weights), expected, rtol=1e-5, atol=1e-6)


def test_experts_that_the_op_does_not_compute_are_an_error_that_says_what_to_write():
    ligertune.register_experts()
    model = with_implementation(tiny_family("causal", "nemotron_h"), "ligertune")
    message = (
        "experts_implementation='ligertune' does not compute NemotronHExperts: its experts have no gate. "
        "Write experts_implementation='grouped_mm'."
    )
    with pytest.raises(UserError) as error:
        model(**inputs_of("nemotron_h"))
    assert str(error.value) == message


class Stored(torch.Tensor):
    """A tensor that kernels must not read as plain memory."""


def test_weights_that_changed_after_patching_are_left_to_transformers_with_a_warning(plain):
    model = computed_by_op("patched", plain)
    expected = model(**inputs_of("qwen3_moe")).loss
    experts = experts_of(model)[0]
    experts.down_proj = torch.nn.Parameter(experts.down_proj.data.as_subclass(Stored))
    with pytest.warns(UserWarning, match="down_proj is a .*Stored.*, so the kernel `experts` does not run"):
        loss = model(**inputs_of("qwen3_moe")).loss
    torch.testing.assert_close(loss.as_subclass(torch.Tensor), expected, rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_lora_of_peft_on_experts_trains_as_without_the_op(way, plain):
    """PEFT replaces the parameters while the experts run (`target_parameters`)."""
    config = LoraConfig(
        target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        r=4, lora_alpha=8, init_lora_weights=False,
    )  # fmt: skip
    results = []
    for model in (computed_by_op(way, plain), copy.deepcopy(plain)):
        torch.manual_seed(0)
        results.append(losses_and_gradients(get_peft_model(model, config), inputs_of("qwen3_moe")))
    (loss, gradients), (expected_loss, expected) = results
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    assert sum("experts" in name for name in expected) == 4 * 2 * 2
    for name, truth in expected.items():
        torch.testing.assert_close(gradients[name], truth, rtol=0, atol=2e-5 * float(truth.abs().max()), msg=name)


def sharded_loss(rank):
    """Return the loss of one rank's row, and the sum of the experts' gradients, with and without the op."""
    results = []
    for ours in (True, False):
        model = tiny_models.make("mixtral", output_router_logits=False)
        if ours:
            patch(model, rope=False, norm=False, loss="torch")
        else:
            with_implementation(model, "eager")
        torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        batch = {name: value[rank : rank + 1] for name, value in tiny_models.batch().items()}
        loss = model(**batch).loss
        loss.backward()
        gradient = model.model.layers[0].mlp.experts.gate_up_proj.grad.full_tensor()
        results.append((float(loss), gradient))
    (loss, gradient), (expected_loss, expected) = results
    return loss, expected_loss, float((gradient - expected).abs().max() / expected.abs().max())


def test_experts_sharded_by_fsdp2_compute_the_same():
    """FSDP2 gathers the weights before the forward of a layer."""
    for loss, expected, error in on_ranks(2, sharded_loss):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert error < 1e-5


def expert_parallel_loss(folder, rank):
    """Return loss and gradients' norm of a model whose experts are spread over two ranks, for two implementations."""
    torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
    ligertune.register_experts()
    results = []
    for implementation in ("ligertune", "grouped_mm"):
        spread = DistributedConfig(tp_size=2, ep_size=2)
        model = AutoModelForCausalLM.from_pretrained(
            folder, experts_implementation=implementation, distributed_config=spread
        ).train()
        loss = model(**inputs_of("qwen3_moe")).loss
        loss.backward()
        experts = experts_of(model)[0]
        assert experts._is_expert_parallel and experts.num_experts == 2
        results.append((float(loss), float(experts.gate_up_proj.grad.to_local().norm())))
    return results


@pytest.mark.skipif("ep_size" not in vars(DistributedConfig), reason="transformers' expert parallelism is older")
def test_experts_spread_over_ranks_by_transformers_compute_the_same(plain, tmp_path):
    plain.save_pretrained(tmp_path)
    expected = float(plain(**inputs_of("qwen3_moe")).loss)
    for ours, theirs in on_ranks(2, functools.partial(expert_parallel_loss, tmp_path)):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert ours[0] == pytest.approx(expected, rel=1e-5)


def test_the_class_names_of_transformers_stay():
    experts = MixtralExperts(transformers.MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    model = torch.nn.Sequential(experts)
    patch(model, loss="torch")
    assert isinstance(experts, MixtralExperts) and isinstance(experts, KernelExperts)
    assert type(experts).__name__ == "MixtralExperts" and type(experts).__module__ == MixtralExperts.__module__
