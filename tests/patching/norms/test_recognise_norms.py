"""Norms of named families: the spec that a probe finds, and the same numbers and gradients once patched."""

import copy
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from support.models.family_check import check_family
from support.models.tiny_families import MAPPINGS
from torch import nn

from ligertune.patching.module_patch import patch_module
from ligertune.patching.norms.kernel_norms import KernelGatedNorm, KernelLayerNorm, KernelNorm, RecomputedLayerNorm
from ligertune.patching.norms.recognise_gated_norms import GatedNormSpec, is_gated_norm, recognise_gated_norm
from ligertune.patching.norms.recognise_norms import (
    LayerNormSpec,
    NormSpec,
    is_layer_norm,
    is_norm,
    is_norm_leaf,
    recognise,
)
from ligertune.patching.patch import patch
from ligertune.patching.probe import Refusal

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MIXINS = {NormSpec: KernelNorm, LayerNormSpec: KernelLayerNorm, GatedNormSpec: KernelGatedNorm}
E = 24
EPS = "variance_epsilon"

# class -> (arguments, spec); the fast part imports few families
FAST = {
    "cohere CohereLayerNorm": ((E,), LayerNormSpec(0.0, EPS)),
    "olmo OlmoLayerNorm": ((E,), LayerNormSpec(0.0, 1e-5)),  # no weight, and its eps stands in its code
    "nemotron NemotronLayerNorm1P": ((E,), LayerNormSpec(1.0)),
    "qwen3_next Qwen3NextRMSNormGated": ((E,), GatedNormSpec(True, "silu", "llama", None, EPS)),
    "zamba2 Zamba2RMSNormGated": ((E, 8), GatedNormSpec(False, "silu", "llama", 8, EPS)),
    "falcon_h1 FalconH1RMSNormGated": ((E, 1e-6, 3, False), GatedNormSpec(False, "silu", "gemma", 8, EPS)),
    "t5 T5LayerNorm": ((E,), NormSpec("llama", 0.0, EPS, mixed=False)),
}
SLOW = {
    "aya_vision CohereLayerNorm": ((E,), LayerNormSpec(0.0, EPS)),
    "cohere2 Cohere2LayerNorm": ((E,), LayerNormSpec(0.0, EPS)),
    "got_ocr2 GotOcr2LayerNorm": ((E,), LayerNormSpec(0.0)),
    "videoprism VideoPrismLayerNorm": ((E,), LayerNormSpec(1.0)),
    "deepseek_v4 DeepseekV4UnweightedRMSNorm": ((), NormSpec("deepseek", 0.0, "eps")),
    "falcon_mamba FalconMambaWeightlessRMSNorm": ((E,), NormSpec("none", 0.0, "eps")),  # has a weight and ignores it
    "glm5_next Glm5NextTextUnweightedRMSNorm": ((), NormSpec("deepseek", 0.0, "eps")),
    "hrm_text HrmTextRMSNorm": ((), NormSpec("none", 0.0, "eps")),
    "inkling2 Inkling2UnweightedRMSNorm": ((), NormSpec("none", 0.0, "eps")),
    "muse_spark MuseSparkTextCenteredRMSNorm": ((E,), NormSpec("gemma", 1.0, "eps", rounded_offset=True)),
    "bamba BambaRMSNormGated": ((E, 8), GatedNormSpec(False, "silu", "llama", 8, EPS)),
    "falcon_h1 FalconH1RMSNormGated, norm first": ((E, 1e-6, 3), GatedNormSpec(True, "silu", "gemma", 8, EPS)),
    "granitemoehybrid GraniteMoeHybridRMSNormGated": ((E, E), GatedNormSpec(False, "silu", "llama", None, EPS)),
    "kimi_linear KimiLinearRMSNormGated": ((E,), GatedNormSpec(True, "sigmoid", "gemma", None, EPS)),
    "nemotron_h NemotronHRMSNormGated": ((E, 12), GatedNormSpec(False, "silu", "llama", 12, EPS)),
    "olmo_hybrid OlmoHybridRMSNormGated": ((E,), GatedNormSpec(True, "silu", "llama", None, EPS)),
    "qwen3_5 Qwen3_5RMSNormGated": ((E,), GatedNormSpec(True, "silu", "llama", None, EPS)),
    "qwen4_exp Qwen4ExpTextRMSNormGated": ((E, 1e-6, "sigmoid"), GatedNormSpec(True, "sigmoid", "llama", None, EPS)),
    "mamba2 MambaRMSNormGated": ((E, 8), GatedNormSpec(False, "silu", "llama", 8, EPS)),
}


def norm_class(name: str) -> type[nn.Module]:
    folder, cls = name.split(",")[0].split()
    folder = "cohere" if folder == "aya_vision" else folder
    return getattr(pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}"), cls)


def found(norm: nn.Module):
    return recognise_gated_norm(norm) if is_gated_norm(norm) else recognise(norm)


def outputs_and_gradients(norm: nn.Module, dtype: torch.dtype, width: int = E) -> list[torch.Tensor]:
    """Return y and the gradients of the inputs and parameters, of random numbers that are always the same."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 5, width).to(dtype).requires_grad_() for _ in range(1 + is_gated_norm(norm))]
    norm = norm.to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    y = norm(*inputs)
    leaves = [*inputs, *norm.parameters()]
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape).to(y.dtype), allow_unused=True)]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_norm_has_the_expected_spec_and_the_same_numbers(name):
    arguments, expected = (FAST | SLOW)[name]
    cls = norm_class(name)
    if name.startswith("mamba2") and "group_size" not in inspect.signature(cls).parameters:
        pytest.skip("transformers 5.17's norm of Mamba-2 has no groups")
    assert found(cls(*arguments)) == expected
    for dtype in (FP32, BF16, FP16):
        plain, patched = cls(*arguments), cls(*arguments)
        patch_module(patched, MIXINS[type(expected)], expected)
        for ours, theirs in zip(*(outputs_and_gradients(norm, dtype) for norm in (patched, plain)), strict=True):
            assert ours.dtype == theirs.dtype
            worst = float(((ours - theirs).abs().max() / theirs.abs().max()).detach())
            assert worst <= {FP32: 2e-6, BF16: 0.02, FP16: 0.003}[dtype]


def test_each_norm_is_counted_in_one_row():
    names = ("nemotron NemotronLayerNorm1P", "zamba2 Zamba2RMSNormGated", "t5 T5LayerNorm")
    norms = [norm_class(name)(*FAST[name][0]) for name in names]
    kinds = (is_layer_norm, is_gated_norm, is_norm)
    assert [[kind(norm) for kind in kinds] for norm in norms] == [[one is other for other in kinds] for one in kinds]
    for norm in norms:
        patch_module(norm, MIXINS[type(found(norm))], found(norm))
    assert [[kind(norm) for kind in kinds] for norm in norms] == [[one is other for other in kinds] for one in kinds]


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (nn.RMSNorm(E, eps=0.5), NormSpec("gemma", 0.0, "eps")),
        (nn.RMSNorm(E, eps=0.5, elementwise_affine=False), NormSpec("none", 0.0, "eps")),  # DiffLlama
        (nn.LayerNorm(E, eps=0.5, bias=False), LayerNormSpec()),
        (nn.LayerNorm(E, eps=0.5, elementwise_affine=False), LayerNormSpec()),
    ],
    ids=str,
)
def test_torchs_norms_are_recognised(norm, expected):
    assert found(norm) == expected
    x = torch.randn(3, E)
    plain = norm(x)
    patch_module(norm, MIXINS[type(expected)], expected)
    torch.testing.assert_close(norm(x), plain)


class Gated(nn.Module):
    """A norm with a gate, which `change` changes."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.weight, self.eps, self.change = nn.Parameter(torch.ones(E)), 1e-6, change

    def forward(self, hidden_states, gate=None):
        wide = hidden_states.float()
        if gate is None:
            return wide.to(hidden_states.dtype)
        if self.change == "centred":
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        act = nn.functional.gelu if self.change == "gelu" else nn.functional.silu
        act = act(gate) if self.change == "rounded gate" else act(gate.float())
        return (self.weight.float() * wide * act).to(hidden_states.dtype)


OTHER_NUMBERS = "its numbers are not those of an RMS norm with a SiLU or sigmoid gate before or after it"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("centred", OTHER_NUMBERS),
        ("gelu", OTHER_NUMBERS),
        ("rounded gate", "it rounds bfloat16 at other places than our kernels"),
    ],
)
def test_a_gated_norm_that_differs_is_left_with_the_reason(change, reason):
    assert recognise_gated_norm(Gated()) == GatedNormSpec(True, "silu", "gemma", None, "eps")
    assert recognise_gated_norm(Gated(change)) == Refusal(reason)


def test_a_gated_norm_without_a_gate_runs_as_before():
    norm = Gated()
    patch_module(norm, KernelGatedNorm, recognise_gated_norm(norm))
    x = torch.randn(3, E)
    assert torch.equal(norm(x), x)


class ChannelsFirstLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ChannelsFirstSequenceLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class StoredStatisticsNorm(nn.Module):
    """Phi-4's audio features."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(E))
        self.register_buffer("scale", torch.ones(E))

    def forward(self, x):
        return (x - self.mean) * self.scale


class StoredNorm(StoredStatisticsNorm):
    def forward(self, x):
        return super().forward(x) / x.norm()


class OwnScale(nn.Module):
    """Normalise as Cohere does, but multiply in the dtype of the hidden states."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape)), 1e-5

    def forward(self, x):
        return self.weight * nn.functional.layer_norm(x.float(), x.shape[-1:], None, None, self.eps).to(x.dtype)


class ScaledLayerNorm(OwnScale):
    pass


class GroupedRMSNorm(nn.Module):
    """Qwen 4's norm of several streams."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.group_size = nn.Parameter(torch.ones(E)), 1e-5, 8

    def forward(self, x):
        groups = x.float().unflatten(-1, (-1, self.group_size))
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        return (groups.flatten(-2) * self.weight.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (ChannelsFirstSequenceLayerNorm(E), "it normalises over channels, which are not the last dimension"),
        (ScaledLayerNorm(E), "it rounds bfloat16 at other places than our kernels"),
        (ScaledLayerNorm(4, E), "its weight is not a tensor of one dimension"),
        (nn.LayerNorm((4, E)), "it normalises over more than the last dimension"),
        (GroupedRMSNorm(), "it normalises groups of columns, which needs a kernel"),
        (nn.GroupNorm(4, E), "it normalises over groups of channels and positions"),
        (nn.BatchNorm1d(E), "it normalises over the examples of a batch or the positions of an image"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_norm_that_is_left_has_a_reason(norm, reason):
    assert found(norm) == Refusal(reason)
    model = nn.ModuleList([norm])
    rows = {row.kernel: row for row in patch(model, loss="torch").rows}
    row = rows["layer_norm" if "LayerNorm" in type(norm).__name__ else "rms_norm"]
    assert (row.applied, row.left, row.note) == (0, 1, f"1 {type(norm).__name__}: {reason}")


@pytest.mark.parametrize("mixin", [KernelLayerNorm, RecomputedLayerNorm])
def test_a_layer_norm_over_the_channels_of_images_is_patched(mixin):
    """Of SAM's towers."""
    plain = ChannelsFirstLayerNorm(E, eps=0.1)
    nn.init.normal_(plain.weight), nn.init.normal_(plain.bias)
    spec = recognise(plain)
    assert spec == LayerNormSpec(mixed=False, channels_first=True)
    patched = copy.deepcopy(plain)
    patch_module(patched, mixin, spec)
    for dtype in (FP32, BF16):
        x = torch.randn(2, E, 3, 4).to(dtype).requires_grad_()
        results = [norm.to(dtype)(x) for norm in (plain, patched)]
        torch.testing.assert_close(*results)
        if dtype is FP32:
            torch.testing.assert_close(*(torch.autograd.grad(y.sum(dim=1).square().sum(), x)[0] for y in results))


def test_a_norm_by_stored_statistics_needs_no_kernel():
    norm = StoredStatisticsNorm()
    row = next(row for row in patch(nn.ModuleList([norm, nn.Linear(1, 1)]), loss="torch").rows if "norm" in row.kernel)
    assert (row.applied, row.left) == (0, 0)
    assert row.note == "1 StoredStatisticsNorm: it uses stored statistics, so there is nothing to sum"
    assert type(recognise(StoredNorm())) is Refusal


def test_a_norm_whose_dtypes_differ_runs_its_own_forward_where_the_kernel_would_round_otherwise():
    """T5's norm multiplies unrounded numbers by a wider weight."""
    cls = norm_class("t5 T5LayerNorm")
    plain, patched = cls(E), cls(E)
    patch_module(patched, KernelNorm, recognise(patched))
    x = torch.randn(4, E).to(BF16)
    assert torch.equal(patched(x), plain(x)) and patched(x).dtype is FP32


def test_nemotrons_norm_rounds_to_autocasts_dtype_as_before():
    cls = norm_class("nemotron NemotronLayerNorm1P")
    plain, patched = cls(E), cls(E)
    patch_module(patched, KernelLayerNorm, recognise(patched))
    x = torch.randn(4, E)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(patched(x), plain(x))


# kernels of all norms -> model types
FAMILIES = {
    "layer_norm": ("cohere", "cohere2", "olmo", "nemotron"),
    "rms_norm": ("deepseek_v4", "falcon_mamba", "hrm_text", "diffllama"),
    "rms_norm, gated_rms_norm": ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "bailing_hybrid", "bamba",
                                 "granitemoehybrid", "nemotron_h", "mamba2", "zamba2"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "kernels"), [(name, kernels) for kernels, names in FAMILIES.items() for name in names]
)
def test_all_norms_of_a_family_are_patched_and_give_the_same_gradients(model_type, kernels):
    if model_type not in MAPPINGS["causal"][1]:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    result = check_family("causal", model_type)
    norms = result.layers["norm"]
    assert (result.outcome, norms.left, ", ".join(norms.applied)) == ("same", 0, kernels), result


ROOT = Path(transformers.__file__).parent / "models"
# Norms that no kernel computes, and why.
LEFT = re.compile(
    r"BatchNorm|GroupNorm|LayerNorm2d|ChameleonLayerNorm|DebertaLayerNorm|EsmFold|DoryL2Norm|Timestep|FlowLayerNorm"
    r"|HYV4|ImageGPTLayerNorm|NoNorm|InputScaled|SqueezeBertLayerNorm|VitDetLayerNorm"
)


@pytest.mark.slow
def test_every_norm_of_transformers_is_recognised_or_listed():
    left = set()
    for file in sorted(ROOT.glob("*/modeling_*.py")):
        names = re.findall(r"^class (\w*Norm(?:1P|2d|Gated)?)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}") if names else None
        for name in names:
            for arguments in ((), (E,), (E, 8)):
                try:
                    norm = getattr(module, name)(*arguments)
                    break
                except Exception:  # other arguments
                    continue
            else:
                continue  # needs a configuration
            if is_norm_leaf(norm) and isinstance(found(norm), Refusal):
                left.add(name)
    assert {name for name in left if not LEFT.search(name)} == set()
