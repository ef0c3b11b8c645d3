"""The package of Hugging Face's `kernels`: layout, layers on whole models, attention, transformers' `use_kernels`."""

import ast
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from functorch.compile import make_boxed_func
from ligertune_kernels.table import OPS
from support.command_line import ROOT
from support.models import tiny_models
from support.models.tiny_families import tiny_family
from support.rerun_interpreted import rerun_interpreted
from support.script_modules import load_script
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from transformers import KernelConfig, PreTrainedModel
from transformers.utils import import_utils, kernel_config

# not `kernels`: without the package, that is the folder of this repository
pytest.importorskip("kernels.layer", reason="needs the package kernels of Hugging Face")
from kernels import (
    LocalLayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# family -> class of its modelling file -> layer of the package, also the name under which `kernels` looks it up
LAYERS = {
    "llama": {"LlamaRMSNorm": "RMSNorm", "LlamaMLP": "SwiGLUMLP"},
    "gemma": {"GemmaRMSNorm": "RMSNormZeroCentered", "GemmaMLP": "GeGLUMLP"},
    "mixtral": {"MixtralRMSNorm": "RMSNorm", "MixtralExperts": "Experts"},
}
GATES = ("_forward_kernel", "_backward_kernel")  # of SwiGLU and GeGLU
NEEDS_KERNELS = pytest.mark.skipif(
    not import_utils.is_kernels_available(), reason="transformers does not take the installed version of kernels"
)


# ---- the package


def test_the_built_folder_has_the_published_layout(package):
    from kernels._rust import Build, Digest, DigestAlgorithm  # what `kernels` reads and verifies a package with

    assert [str(backend).lower() for backend in Build.open(package).general.backends] == ["cpu", "cuda", "rocm"]
    variant = package / "build" / "torch-rocm"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["digest"]["files"] == Digest.hash_variant(DigestAlgorithm.SHA256, variant).files
    assert metadata["id"].startswith("_ligertune_kernels_rocm_") and metadata["backend"] == {"type": "rocm"}
    sources = {path.relative_to(variant): path.read_bytes() for path in variant.rglob("*.py")}
    assert {name: (package / "build" / "torch-cuda" / name).read_bytes() for name in sources} == sources
    del sources[Path("ligertune_kernels/__init__.py")]  # kernel-builder makes it itself
    built = package / "torch-ext" / "ligertune_kernels"
    assert {path.relative_to(built): path.read_bytes() for path in built.rglob("*.py")} == sources


def test_the_package_imports_itself_relatively_and_else_only_torch_and_triton(package):
    imported = set()
    for path in (package / "torch-ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "triton"}


def test_a_package_exports_every_op_and_registers_operators_under_its_own_name(kernel):
    assert kernel.__name__.startswith("_ligertune_kernels_")
    for op in OPS:
        assert getattr(kernel, op.name).__module__.startswith(f"{kernel.__name__}.ops.{op.folder}.")
    assert hasattr(getattr(torch.ops, kernel.__name__), "linear_cross_entropy_chunks")


def test_older_versions_of_kernels_find_the_package_in_a_folder_of_its_name(package, kernel):
    variant = Path(kernel.__file__).parent
    spec = importlib.util.spec_from_file_location("found_by_name", variant / "ligertune_kernels" / "__init__.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    assert found.__all__ == kernel.__all__ and found.rms_norm is kernel.rms_norm and found.layers is kernel.layers


def test_an_import_that_would_not_be_relative_is_refused():
    relative = load_script("build_hub_package").relative
    path = Path("ops/norms/rms_norm.py")
    assert relative("from ligertune_kernels.chips import Chip", path) == "from ...chips import Chip"
    for source in ("import ligertune_kernels", "x = import_module('ligertune_kernels.chips')"):
        with pytest.raises(ValueError, match=r"rms_norm.py:1: names ligertune_kernels"):
            relative(source, path)


def test_a_folder_with_files_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "notes").write_text("")
    monkeypatch.setattr(sys, "argv", ["build_hub_package", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        load_script("build_hub_package").main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"Error: {tmp_path} is not an empty folder. Name a new one.\n"


# ---- layers on whole models


@contextmanager
def extensible(family: str, model: PreTrainedModel) -> Iterator[None]:
    """Give the layers of a model the names that `kernels` looks up, where transformers has not.

    transformers names norms and rotary functions itself if it takes the installed version of `kernels`.
    """
    modelling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    named = [cls for cls in map(vars(modelling).get, LAYERS[family]) if not hasattr(cls, "kernel_layer_name")]
    rotate = modelling.apply_rotary_pos_emb
    for cls in named:
        replace_kernel_forward_from_hub(cls, LAYERS[family][cls.__name__])
    if not isinstance(rotate, nn.Module):
        modelling.apply_rotary_pos_emb = use_kernel_forward_from_hub("rotary_pos_emb")(rotate)
        for module in model.modules():
            if type(module).__name__.endswith("Attention"):
                module._kernel_funcs = {"apply_rotary_pos_emb": modelling.apply_rotary_pos_emb}
    try:
        yield
    finally:
        modelling.apply_rotary_pos_emb = rotate
        vars(rotate).pop("forward", None)
        for cls in named:
            del cls.kernel_layer_name, cls.kernel_condition


def names_of(family: str) -> dict[str, str]:
    """Return name of a layer -> layer of the package."""
    return {layer: layer for layer in LAYERS[family].values()} | {"rotary_pos_emb": "RotaryPosEmb"}


def mapping_of(family: str, package: Path) -> dict[str, dict[str, LocalLayerRepository]]:
    return {n: {DEVICE: LocalLayerRepository(package, layer_name=layer)} for n, layer in names_of(family).items()}


def config_of(family: str, package: Path) -> KernelConfig:
    return KernelConfig({n: f"{package}:{layer}" for n, layer in names_of(family).items()}, use_local_kernel=True)


def replaced(model: PreTrainedModel, kernel: ModuleType) -> set[str]:
    """Return the classes whose modules all run a forward of the package, and RotaryPosEmb if it rotates q and k."""
    functions = [func for module in model.modules() for func in getattr(module, "_kernel_funcs", {}).values()]
    forwards: dict[str, set[bool]] = {}
    for module in (*model.modules(), *functions):
        ours = getattr(vars(module).get("forward"), "__module__", "").startswith(kernel.__name__)
        forwards.setdefault(type(module).__name__, set()).add(ours)
    return {name for name, ours in forwards.items() if ours == {True}}


def loss_and_gradients(
    model: PreTrainedModel, call: Callable | None = None, **inputs: Tensor
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = (model if call is None else call)(**(inputs or tiny_models.batch(device=DEVICE))).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(
    ours: tuple[float, dict[str, Tensor]], plain: tuple[float, dict[str, Tensor]], *, within: float = 1e-5
) -> None:
    assert ours[0] == pytest.approx(plain[0], abs=within)
    assert ours[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        assert (ours[1][name] - gradient).norm() <= within * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("family", LAYERS)
def test_kernelized_models_train_as_plain_ones(family, package, kernel):
    model = tiny_models.make(family).to(DEVICE)
    plain = loss_and_gradients(model)
    with extensible(family, model), use_kernel_mapping(mapping_of(family, package), inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device=DEVICE)
        assert replaced(model, kernel) == {*LAYERS[family], "Func"}
        assert_same_training(loss_and_gradients(model), plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
def test_kernelized_models_compile_to_one_graph(family, package, kernel):
    """The references under a compiler, except for the experts; test_kernels_train_on_a_gpu has the kernels."""
    model = tiny_models.make(family, output_router_logits=False).to(DEVICE)
    plain = loss_and_gradients(model)
    with extensible(family, model), use_kernel_mapping(mapping_of(family, package), inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=DEVICE)
        assert replaced(model, kernel) == {*LAYERS[family], "Func"}
        torch._dynamo.reset()
        # the reference of the experts reads on the host which tokens an expert has; the kernels do not
        compiled = torch.compile(model, backend="aot_eager", fullgraph=family != "mixtral")
        assert_same_training(loss_and_gradients(model, compiled), plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
def test_models_compile_to_one_graph_that_launches_the_kernels(family, package, kernel, monkeypatch):
    """Traced on meta tensors for an H100 that is absent."""
    pytest.importorskip("triton", reason="needs triton: there is no kernel to trace without it")
    from support.kernels.pretend_gpu import TARGETS
    from support.kernels.traced_kernels import traced_for
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    launches: Counter[str] = Counter()

    def collect(graph: torch.fx.GraphModule, _: object) -> Callable:
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                launches[kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).fn.__name__] += 1
        return make_boxed_func(graph.forward)

    model = tiny_models.make(family, output_router_logits=False).to("meta")
    launcher = importlib.import_module(f"{kernel.__name__}.launcher")
    with extensible(family, model), use_kernel_mapping(mapping_of(family, package), inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=DEVICE)
        with traced_for(TARGETS["sm90"], monkeypatch, launcher.meta_runs_as):
            compiled = torch.compile(model, backend=aot_autograd(fw_compiler=collect), fullgraph=True)
            tokens = torch.empty(2, 24, dtype=torch.int64, device="meta")
            compiled(input_ids=tokens, use_cache=False).logits.sum().backward()
    # two layers: five norms, two rotations in each direction, two MLPs or two mixtures
    assert launches["forward_kernel"] == launches["backward_kernel"] == 5
    assert launches["_rope_kernel"] == 4
    gates = ("_activation_kernel", "_activation_backward_kernel") if family == "mixtral" else GATES
    assert [launches[name] for name in gates] == [2, 2]


def test_a_layer_for_another_activation_is_refused(package):
    model = tiny_models.make("gemma").to(DEVICE)
    mapping = {"GeGLUMLP": {DEVICE: LocalLayerRepository(package, layer_name="SwiGLUMLP")}}
    with extensible("gemma", model), use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device=DEVICE)
        with pytest.raises(ValueError, match="the activation of GemmaMLP is not silu: map another layer to it"):
            loss_and_gradients(model)


# ---- transformers' own switches


@NEEDS_KERNELS
@pytest.mark.parametrize("family", LAYERS)
def test_use_kernels_with_a_kernel_config_trains_as_a_plain_model(family, package, kernel, monkeypatch):
    # transformers' list of devices leaves the CPU out; the code behind it is the same
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", ["cpu", "cuda", "rocm"])
    model = tiny_models.make(family).to(DEVICE)
    plain = loss_and_gradients(model)
    with extensible(family, model):
        model.set_use_kernels(True, config_of(family, package))
        assert replaced(model, kernel) == {*LAYERS[family], "Func"}
        assert_same_training(loss_and_gradients(model), plain)


@NEEDS_KERNELS
def test_packed_and_padded_rows_train_with_the_package_as_attention(package, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"ligertune/ligertune-kernels={package}")
    tokens = torch.randint(3, tiny_models.VOCAB, (1, 20), device=DEVICE)
    edges = torch.tensor([0, 8, 20], dtype=torch.int32, device=DEVICE)
    positions = torch.cat((torch.arange(8), torch.arange(12)))[None].to(DEVICE)
    packed = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 12, "max_length_k": 12}
    inputs = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    model = tiny_models.make("llama", attn_implementation="ligertune/ligertune-kernels").to(DEVICE)
    ours = loss_and_gradients(model, **inputs, **packed)
    visible = torch.block_diag(torch.ones(8, 8), torch.ones(12, 12)).tril().bool()[None, None].to(DEVICE)
    sdpa = tiny_models.make("llama", attn_implementation="sdpa").to(DEVICE)
    plain = loss_and_gradients(sdpa, **inputs, attention_mask=visible)
    assert_same_training(ours, plain)
    assert_same_training(loss_and_gradients(model), loss_and_gradients(sdpa))  # padded rows


@NEEDS_KERNELS
def test_a_hybrid_takes_the_functions_of_its_mixers_from_the_package(package, kernel, monkeypatch):
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", ["cpu", "cuda", "rocm"])
    model = tiny_family("causal", "qwen3_5_text").to(DEVICE)
    edges = torch.tensor([0, 8, 20], dtype=torch.int32, device=DEVICE)
    positions = torch.cat((torch.arange(8), torch.arange(12)))[None].to(DEVICE)
    tokens = torch.randint(3, 100, (1, 20), device=DEVICE)
    plain = loss_and_gradients(model, input_ids=tokens, labels=tokens)
    alone = torch.cat([model(input_ids=part).logits for part in tokens.split((8, 12), 1)], 1)
    names = ("causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    model.set_use_kernels(True, KernelConfig({name: f"{package}:{name}" for name in names}, use_local_kernel=True))
    assert_same_training(loss_and_gradients(model, input_ids=tokens, labels=tokens), plain)
    packed = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 12, "max_length_k": 12}
    # attention gets a mask, and the recurrence the bounds of the documents
    mask = torch.block_diag(torch.ones(8, 8), torch.ones(12, 12)).tril().bool()[None, None].to(DEVICE)
    masks = {"full_attention": mask, "linear_attention": None}
    out = model(input_ids=tokens, position_ids=positions, attention_mask=masks, use_cache=False, **packed).logits
    torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_kernels_benchmark_runs(package, tmp_path):
    from kernels.cli.benchmark import run_benchmark

    result = run_benchmark(str(package), None, None, iterations=2, warmup=1, output=str(tmp_path / "result.json"))
    assert len(result.timing_results) == 4
    assert all(timing.verified for timing in result.timing_results.values())


@pytest.mark.slow
def test_kernels_of_the_package_under_the_interpreter_and_transformers_use_kernels(monkeypatch):
    monkeypatch.setenv("LIGERTUNE_TEST_ANY_VERSION_OF_KERNELS", "1")
    rerun_interpreted(str(ROOT / "tests" / "kernels" / "hub"), "-m", "not slow")


@pytest.mark.gpu
@pytest.mark.parametrize("family", LAYERS)
def test_kernels_train_on_a_gpu_compiled_and_not(family, package, kernel):
    model = tiny_models.make(family, output_router_logits=False).to(DEVICE)
    plain = loss_and_gradients(model)
    with extensible(family, model), use_kernel_mapping(mapping_of(family, package), inherit_mapping=False):
        if import_utils.is_kernels_available():
            model.set_use_kernels(True, config_of(family, package))
        else:
            kernelize(model, mode=Mode.TRAINING, device=DEVICE)
        assert replaced(model, kernel) == {*LAYERS[family], "Func"}
        assert_same_training(loss_and_gradients(model), plain, within=1e-4)
        torch._dynamo.reset()
        assert_same_training(loss_and_gradients(model, torch.compile(model, fullgraph=True)), plain, within=1e-4)
