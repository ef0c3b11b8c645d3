"""Recognition of experts classes by their numbers: every class of transformers, and classes that only look similar."""

import ast
import copy
import importlib
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from ligertune_kernels.ops.moe.experts import ExpertLayout, GatedActivation
from support.models.moe_families import CLAMPED, GPT_OSS, LIMITED, PLAIN, TRANSPOSED, eager_model, experts_of
from support.models.tiny_families import tiny_config
from support.rerun_interpreted import rerun_interpreted
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from ligertune.patching.experts.kernel_experts import experts_forward
from ligertune.patching.experts.recognise_experts import ExpertsSpec, recognise_experts
from ligertune.patching.mlps.kernel_mlps import KernelExpertGate
from ligertune.patching.mlps.recognise_mlps import GatedSpec
from ligertune.patching.patch import patch
from ligertune.patching.probe import Refusal

CONFIG = transformers.MixtralConfig(hidden_size=32, intermediate_size=40, num_local_experts=4)
GPT_OSS_CONFIG = transformers.GptOssConfig(hidden_size=32, intermediate_size=40, num_local_experts=4)
SOFTCAPPED = ("Inkling2Experts", "Inkling2LoopExperts")
OTHERS = {  # classes whose spec is not PLAIN, or part of the reason why they have none
    "AriaExperts": TRANSPOSED,
    "DeepseekV4Experts": LIMITED,
    "Glm5NextTextExperts": LIMITED,
    "HYV4Experts": LIMITED,
    "HYV4VLExperts": LIMITED,
    "GptOssExperts": GPT_OSS,
    "MiniMaxM3VLExperts": ExpertsSpec(CLAMPED, ExpertLayout()),
    "OpenAIPrivacyFilterExperts": ExpertsSpec(CLAMPED, ExpertLayout(transposed=True)),
    "Gemma4TextExperts": ExpertsSpec(GatedActivation("gelu_tanh"), ExpertLayout()),
    "DiffusionGemmaTextExperts": ExpertsSpec(GatedActivation("gelu_tanh"), ExpertLayout()),
    "MuseSparkExperts": "post_expert_norm",
    "NemotronHExperts": "no gate",
    **dict.fromkeys(SOFTCAPPED, "'up'"),
}


def decorated_classes():
    """Return (module, class) of every class with `use_experts_implementation` in the installed transformers."""
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if "use_experts_implementation" not in source:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and "use_experts" in " ".join(map(ast.unparse, node.decorator_list)):
                found.append((f"transformers.models.{path.parent.name}.{path.stem}", node.name))
    return found


def sizes(config):
    """Return a tiny configuration; experts that are switched off by default are switched on."""
    small = tiny_config(config)
    for name, value in {"num_experts": 4, "moe_intermediate_size": 24, "swiglu_limit": 0.5}.items():
        if hasattr(small, name) and (getattr(small, name) is None):
            setattr(small, name, value)
    return small


def experts_module(module_name, class_name):
    """Return a small random module of a class, built from the configuration of its file that fits."""
    module = importlib.import_module(module_name)
    configs = importlib.import_module(module_name.replace(".modeling_", ".configuration_"))
    candidates = [
        value for value in vars(configs).values() if inspect.isclass(value) and value.__name__ != "PreTrainedConfig"
    ]
    errors = []
    for config_class in candidates:
        if not issubclass(config_class, PreTrainedConfig):
            continue
        try:
            config = sizes(config_class())
            widths = getattr(config, "moe_intermediate_size", None)  # a list: of text and of images
            experts = getattr(module, class_name)(config, *(widths[:1] if isinstance(widths, list) else ()))
        except Exception as error:  # a configuration of another part of the model
            errors.append(f"{config_class.__name__}: {error}")
            continue
        experts.config._experts_implementation_internal = "eager"
        generator = torch.Generator().manual_seed(0)
        for parameter in experts.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
        return experts
    raise AssertionError(errors)


def run(experts, function):
    """Return the output of experts for 12 tokens with a gradient, and all gradients."""
    generator = torch.Generator().manual_seed(1)
    experts.zero_grad()
    width = experts.gate_up_proj.shape[1 if getattr(experts, "is_transposed", False) else 2]
    x = torch.randn(12, width, generator=generator, requires_grad=True)
    weights = torch.rand(12, 2, generator=generator, requires_grad=True)
    index = torch.stack([torch.randperm(len(experts.down_proj) - 1, generator=generator)[:2] for _ in range(12)])
    output = function(experts, x, index, weights)
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    return [output.detach(), x.grad, weights.grad, *(p.grad.clone() for p in experts.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(("module_name", "class_name"), decorated_classes(), ids=lambda name: name.rpartition(".")[2])
def test_every_class_with_experts_is_recognised_and_computed(module_name, class_name):
    """Outputs and gradients of input, router weights and parameters are those of the class's own loop."""
    experts = experts_module(module_name, class_name)
    expected, found = OTHERS.get(class_name, PLAIN), recognise_experts(experts)
    if isinstance(expected, str):
        assert isinstance(found, Refusal) and expected in found.reason
        return
    assert found == expected
    results = zip(run(experts, experts_forward), run(experts, type(experts).forward), strict=True)
    for ours, theirs in results:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.slow
def test_the_triton_kernels_compute_every_class():
    """Under the interpreter; elsewhere a CPU runs the reference."""
    rerun_interpreted(__file__, "-m", "slow", "-k", "every_class and not triton")


def test_experts_on_the_meta_device_are_recognised():
    """Plans are made of models without weights."""
    with torch.device("meta"):
        assert recognise_experts(MixtralExperts(CONFIG)) == PLAIN


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_with_a_norm_keep_their_code_but_for_the_activation(implementation):
    pytest.importorskip("transformers.models.muse_spark")
    plain = experts_module("transformers.models.muse_spark.modeling_muse_spark", "MuseSparkExperts")
    plain.config._experts_implementation_internal = implementation
    assert recognise_experts(plain) == GatedSpec("swiglu", "none", packed=True)
    patched = copy.deepcopy(plain)
    for note in ("", "1 patched before"):
        rows = {row.kernel: row for row in patch(nn.Sequential(patched), norm=False, loss="torch").rows}
        assert (rows["swiglu"].applied, rows["swiglu"].note, "experts" in rows) == (1, note, False)
    assert isinstance(patched, KernelExpertGate)
    for ours, theirs in zip(*(run(model, type(model).forward) for model in (patched, plain)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


class Scaled(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 1.01 * super().forward(hidden_states, top_k_index, top_k_weights)


class WeightedBefore(MixtralExperts):
    """Applies the router's weight to the input (Llama 4)."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        ones = torch.ones_like(top_k_weights[:, :1])
        slots = range(top_k_index.shape[1])
        parts = [
            super(WeightedBefore, self).forward(
                hidden_states * top_k_weights[:, k : k + 1], top_k_index[:, k : k + 1], ones
            )
            for k in slots
        ]
        return sum(parts)


class Dropping(MixtralExperts):
    """Differs in training mode only."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        output = super().forward(hidden_states, top_k_index, top_k_weights)
        return nn.functional.dropout(output, 0.5, training=self.training)


class Float32Output(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights).float()


class ClampedAfterwards(GptOssExperts):
    """Clamps the activation instead of its input, as Step 3.7 does: that differs by 5e-5 at the limit."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return (gate * torch.sigmoid(gate * self.alpha)).clamp(max=self.limit) * (up.clamp(-self.limit, self.limit) + 1)


class ExtraParameter(MixtralExperts):
    def __init__(self, config):
        super().__init__(config)
        self.scales = nn.Parameter(torch.ones(config.num_local_experts))


class Capacity(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights, capacity=None):
        return super().forward(hidden_states, top_k_index, top_k_weights)


@pytest.mark.parametrize(
    "cls", [Scaled, WeightedBefore, Dropping, Float32Output, ClampedAfterwards, ExtraParameter, Capacity]
)
def test_experts_that_differ_are_refused(cls):
    experts = cls(GPT_OSS_CONFIG if issubclass(cls, GptOssExperts) else CONFIG)
    experts.config._experts_implementation_internal = "eager"
    assert isinstance(recognise_experts(experts), Refusal)


def test_further_parameters_are_named():
    assert recognise_experts(ExtraParameter(CONFIG)) == Refusal("it has scales")


@pytest.mark.parametrize("activation", ["relu", "quick_gelu", "relu2"])
def test_another_activation_is_refused(activation):
    experts = MixtralExperts(CONFIG)
    experts.act_fn = ACT2FN[activation]
    reason = recognise_experts(experts).reason
    assert reason.startswith("its activation") and reason.endswith("is neither SiLU nor GELU")


def test_limits_and_factors_of_the_instance_are_read():
    experts = GptOssExperts(GPT_OSS_CONFIG)
    experts.limit, experts.alpha = 3.5, 1.25
    assert recognise_experts(experts).activation == GatedActivation("silu", 1.25, 3.5, 1.0)


def test_a_forward_replaced_in_the_class_is_probed_again(monkeypatch):
    class Experts(MixtralExperts):
        pass

    experts = Experts(CONFIG)
    experts.config._experts_implementation_internal = "eager"
    assert recognise_experts(experts) == PLAIN
    monkeypatch.setattr(Experts, "forward", Scaled.forward)
    assert isinstance(recognise_experts(experts), Refusal)
    monkeypatch.undo()
    assert recognise_experts(experts) == PLAIN


@pytest.mark.parametrize("name", ["forward", "_apply_gate"])
def test_what_was_replaced_on_the_instance_is_respected(name):
    model = eager_model("causal", "mixtral")
    experts = experts_of(model)[0]
    setattr(experts, name, getattr(experts, name))
    row = next(row for row in patch(model, loss="torch").rows if row.kernel == "experts")
    assert row.left == 1 and f"its {name} was replaced on the instance" in row.note


def test_weights_in_eight_bits_are_refused():
    experts = MixtralExperts(CONFIG)
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    assert recognise_experts(experts).reason == "down_proj has dtype float8_e4m3fn"
