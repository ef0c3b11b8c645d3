"""Tiled layers: the losses and gradients of untiled ones, with the MLP's tensors of one tile at a time."""

import math
from dataclasses import replace

import pytest
import torch
from support.models import tiny_models
from support.storages import MadeStorages
from torch.utils._python_dispatch import TorchDispatchMode

from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.activations.tiling import TiledLinear, TiledMLP, TiledNorm, tile_layers, tile_projections, tiled
from ligertune.errors import UserError
from ligertune.models.shape import base_of, read_shape, text_layers
from ligertune.models.trainable import apply_method
from ligertune.patching.lora.joint_lora import siblings_of
from ligertune.patching.patch import patch
from ligertune.planning.memory.activation_bytes import ActivationPolicy, LayerStack, MicroBatch, StepBytes, step_phases
from ligertune.planning.memory.model_shape import HeadShape, LayerShape
from ligertune.planning.memory.tiled_bytes import saved_by_tiled_layer, tiled_phases
from ligertune.planning.options import MethodOptions
from ligertune.training.optim.combined import OptimizerInBackward

TILE, ROWS, LENGTH = 7, 2, 20
FROZEN = {"type": "freeze", "trainable": [r"layers\.1\."]}
LORA = {"type": "lora", "lora_r": 4}
FUSED = dict(LORA)  # with `kernels.lora`


def made(family: str, method: dict | None, *, tile: int, kind: bool | str = True, device: str = "cpu", **changes):
    model = tiny_models.make(family, **changes).to(device).train()
    patch(model)
    if tile:
        tile_layers(model, tile)
    checkpoint_layers(model, kind, overlap=not tile)
    torch.manual_seed(0)  # of the adapters
    fused = method is FUSED
    model = model if method is None else apply_method(model, MethodOptions(**method), fused=fused)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide the gradients of A
            torch.nn.init.normal_(parameter, std=0.1)
    if tile:
        tile_projections(model, tile)
    return model


def trained(model, *, device: str = "cpu", **shape: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of one batch."""
    shape = {"rows": ROWS, "length": LENGTH, **shape}
    loss = model(**tiny_models.batch(device=device, **shape), use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def test_a_layer_without_tokens_returns_none_of_its_outputs():
    layer = torch.nn.Linear(4, 6)
    for hidden in (torch.zeros(2, 0, 4), torch.zeros(2, 0, 4, requires_grad=True)):
        out = tiled(layer, hidden, list(layer.parameters()), TILE)
        out.sum().backward()
        assert out.shape == (2, 0, 6)


# each family with another method: norms of inputs and of outputs, of heads, packed gate and up, sliding windows
CASES = [
    ("llama", None), ("llama", LORA), ("gemma2", LORA), ("gemma2", None), ("qwen3", LORA), ("qwen2", FROZEN),
    ("phi3", None), ("olmo2", LORA), ("llama", FUSED),
]  # fmt: skip


@pytest.mark.parametrize(("family", "method"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_untiled_layers(family, method):
    plain, tiled = (made(family, method, tile=tile) for tile in (0, TILE))
    assert sum(isinstance(module, TiledMLP) for module in tiled.modules()) == 2
    (loss, expected), (found_loss, found) = trained(plain), trained(tiled)
    assert found_loss == loss and found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [None, LORA], ids=str)
def test_offloaded_without_overlap_on_a_gpu_the_gradients_are_those_of_plain_layers(method):
    sizes = {"num_hidden_layers": 6, "max_position_embeddings": 8192}
    plain = made("llama", method, tile=0, device="cuda", **sizes)
    tiled = made("llama", method, tile=512, kind="offload", device="cuda", **sizes)
    for _ in range(2):  # the second step reuses the pinned memory of the first
        (_, expected), (_, found) = (trained(model, device="cuda", length=2000) for model in (plain, tiled))
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("method", [None, LORA], ids=str)
def test_no_tensor_of_the_mlps_width_has_more_tokens_than_a_tile(method):
    model, most = made("llama", method, tile=TILE, intermediate_size=99), 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal most
            given = function(*args, **(kwargs or {}))
            for one in given if isinstance(given, tuple | list) else (given,):
                if isinstance(one, torch.Tensor) and one.ndim > 1 and one.shape[-1] == 99 and one.shape[-2] != 64:
                    most = max(most, one.shape[:-1].numel())
            return given

    with Watch():
        trained(model)
    assert most == TILE


def test_the_second_run_of_a_layer_ends_before_its_mlp(monkeypatch):
    """Each tile's up projection runs once in the forward and once in the backward."""
    model, products = made("llama", None, tile=TILE), []
    linear = torch.nn.functional.linear
    counting = lambda x, weight, bias=None: products.append(weight.data_ptr()) or linear(x, weight, bias)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    trained(model)
    tiles = math.ceil(ROWS * LENGTH / TILE)
    assert products.count(model.model.layers[0].mlp.up_proj.weight.data_ptr()) == 2 * tiles


def test_layers_that_share_their_input_keep_nothing_after_a_step():
    """An output that waits for its layer's call has the graph of a tile, and with it the input of the whole row."""
    model = made("llama", FUSED, tile=TILE)
    trained(model)
    siblings = [found for module in model.modules() if (found := siblings_of(module)) is not None]
    assert siblings and not any(one._waiting for one in siblings)


def test_a_norm_in_front_is_not_saved(monkeypatch):
    """Attention's projections save the norm's input, which is the layer's: one tensor for all of them."""
    model = made("llama", LORA, tile=TILE)
    assert sum(isinstance(module, TiledLinear) for module in model.modules()) == 8
    layer, saved = model.model.model.layers[1], []
    hidden = torch.randn(1, LENGTH, 64, requires_grad=True)
    normed = layer.input_layernorm(hidden)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        layer.self_attn.q_proj(normed), layer.self_attn.v_proj(normed)
    assert saved == 2 * [hidden.data_ptr()]
    normed.add_(1.0)  # it is no longer what the norm computed
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        layer.self_attn.q_proj(normed)
    assert saved[2:] == [normed.data_ptr()]


def test_gradients_of_weights_in_16_bits_are_added_in_32():
    """Sums in bfloat16 would lose what many tiles add: each gradient is rounded twice, however many tiles there are."""
    errors = {}
    exact = trained(made("llama", None, tile=0).double(), length=400)[1]
    for tile in (0, 8):
        found = trained(made("llama", None, tile=tile).bfloat16(), length=400)[1]
        name = "model.layers.1.mlp.down_proj.weight"
        errors[tile] = ((found[name] - exact[name]).norm() / exact[name].norm()).item()
    assert errors[8] < 1.3 * errors[0]


def test_evaluation_runs_in_tiles_too():
    plain, tiled = (made("llama", LORA, tile=tile).eval() for tile in (0, TILE))
    with torch.no_grad():
        logits = [
            model(**tiny_models.batch(rows=ROWS, length=LENGTH), use_cache=False).logits for model in (plain, tiled)
        ]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_hooks_on_a_norm_see_what_reaches_the_projections():
    model = made("llama", LORA, tile=TILE)
    for layer in model.model.model.layers:
        assert isinstance(layer.input_layernorm, TiledNorm)
        layer.input_layernorm.register_forward_hook(lambda _, args, output: output * 0.5)
    changed = trained(model)[0]
    plain = made("llama", LORA, tile=0)
    for layer in plain.model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda _, args, output: output * 0.5)
    assert changed == pytest.approx(trained(plain)[0], rel=1e-6)


def test_a_model_whose_mlps_are_not_patched_is_refused():
    with pytest.raises(
        UserError, match=r"train\.tiled_mlp: no MLP of LlamaForCausalLM is one that our kernels compute"
    ):
        tile_layers(tiny_models.make("llama"), TILE)


# ---- predicted memory

LAYER = LayerShape(hidden=4096, query=4096, key=1024, heads=32, mlp=14336, norms=8192, adapters=224, norms_train=False)
HEAD = HeadShape(128256, 4096, head_trains=False, embedding_trains=False)
STEP = StepBytes(itemsize=2, gradients=0, optimizer_step=0, workspace=0)


def bytes_per_token(phase: str, **policy) -> float:
    """Return the bytes that a phase needs for one more token of a long row."""
    found = []
    for tokens in (1 << 20, 1 << 21):  # where the tensors of a tile are small
        batch = MicroBatch(tokens, tokens, tokens, accumulates=False)
        phases = tiled_phases(LAYER, HEAD, ActivationPolicy(tile=4096, **policy), batch, STEP, LayerStack(32))
        found.append(next(one.activations + one.working for one in phases if one.name == phase))
    return (found[1] - found[0]) / (1 << 20)


def test_the_widest_points_hold_what_the_module_says():
    """Llama-3.1-8B: 8 KiB of hidden state per token; attention's backward holds 7 of these, the forward 6.5."""
    small = 2 * 128 * 2 + 40  # rotary tables and the batch
    kib = 8192
    assert bytes_per_token("first layer", checkpointing="offload") == 7 * kib + small + 4 * (32 + 2) + 4 * 32
    assert bytes_per_token("forward", checkpointing="offload") == 6.5 * kib + small
    # without offloading, the inputs of all 32 layers are on the device when the last one is run again
    kept = bytes_per_token("backward", checkpointing=True)
    assert kept - bytes_per_token("backward", checkpointing="offload") == 31 * kib


@pytest.mark.parametrize("method", [None, LORA, FUSED], ids=["full", "lora", "kernels.lora"])
def test_in_the_backward_every_layer_has_the_tensors_that_the_plan_counts(method):
    """Counted where the gradients of a layer's output and of its attention's output arrive, without tiles.

    Inputs stay on the device here, so a layer also has those of the layers before it. It has nothing of those after it.
    """
    model, length = made("llama", method, tile=100, num_hidden_layers=3), 300
    layer = read_shape(model).layer
    hidden, keys = 4 * length * layer.hidden, 4 * length * layer.key
    saved = length * saved_by_tiled_layer(layer, ActivationPolicy(tile=100), 4)
    statistics = 4 * length * (layer.heads + 2)  # left out below, as are the gradients of weights
    copy = 4 * length * layer.query  # torch's attention on a CPU returns its output in a layout that is copied
    expected, found = {}, {}

    def record(output: torch.Tensor, key: tuple[str, int]) -> None:
        if output.requires_grad:  # the gradient arrives at the output of the first run
            output.register_hook(lambda _: found.update({key: sum(n for n in made_storages.sizes() if n >= keys)}))

    for i, one in enumerate(text_layers(base_of(model))):
        one.register_forward_hook(lambda _, args, output, i=i: record(output, ("layer", i)))
        one.self_attn.register_forward_hook(lambda _, args, output, i=i: record(output[0], ("attention", i)))
        expected |= {("layer", i): (i + 2) * hidden, ("attention", i): i * hidden + saved - statistics + copy}
    ids = torch.randint(3, tiny_models.VOCAB, (1, length))
    with MadeStorages(model) as made_storages:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert found == expected


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tile", [0, 7])
def test_the_last_layer_has_no_gradient_of_a_head_that_was_updated_before(tile, tied):
    """An optimizer in the backward updates the head first, unless the embedding adds to the gradient of its weight."""
    model = made("llama", None, tile=tile, tie_word_embeddings=tied)
    optimizer = OptimizerInBackward([torch.optim.SGD([p], lr=0.1) for p in model.parameters()])
    size = 4 * model.lm_head.weight.numel()
    found = []

    def record(layer: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        output.register_hook(lambda _: found.append(made_storages.sizes().count(size)))

    text_layers(base_of(model))[-1].register_forward_hook(record)
    with MadeStorages(model) as made_storages:
        trained(model)
    assert found == [int(tied)]
    optimizer.step()

    def loss_held(phases_of, *, in_backward: bool) -> int:
        batch, policy = MicroBatch(100, 100, 100, accumulates=False), ActivationPolicy(tile=tile, checkpointing=True)
        phases = phases_of(LAYER, head, policy, batch, replace(STEP, in_backward=in_backward), LayerStack(3))
        return next(phase.loss for phase in phases if phase.name == "backward")

    head = replace(HEAD, head_trains=True, embedding_trains=True, tied=tied)
    for phases_of in (tiled_phases, step_phases):
        freed = loss_held(phases_of, in_backward=False) - loss_held(phases_of, in_backward=True)
        assert freed == (0 if tied else head.elements * STEP.itemsize)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [None, LORA], ids=str)
def test_the_predicted_peak_is_within_3_percent_on_a_gpu(method, tmp_path):
    from support.quickstart_runs import plan_run

    from ligertune.run import run

    changes = {"model.init": "random", "data.packing": True, "data.max_length": 512, "train.max_steps": 2,
               "train.per_device_train_batch_size": 256, "train.gradient_checkpointing": "offload",
               "train.tiled_mlp": 4096}  # fmt: skip
    adapted = {} if method is None else {f"method.{key}": value for key, value in method.items()}
    job = plan_run(tmp_path, **changes, **adapted)
    report = run(job, lambda line: None)
    assert job.plan.peak.total == pytest.approx(report.peak_memory["allocated_run"], rel=0.03)
