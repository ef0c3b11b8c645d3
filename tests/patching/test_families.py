"""Families of transformers that no other test builds: with kernels they compute what they do without."""

import re

import pytest
import transformers
from support.command_line import ROOT
from support.models import family_check, tiny_models
from support.models.family_check import FamilyResult, LayerState, check_family, layer_states
from support.models.tiny_families import MAPPINGS
from support.script_modules import script_module

from ligertune.patching.patch import PatchReport
from ligertune.planning.plan import KernelLine

PAGE = ROOT / "docs" / "families.md"
MIXER = {"rms_norm", "gated_rms_norm", "linear_cross_entropy"}
DELTA_RULE = {*MIXER, "gated_delta_rule"}
# Norms without a weight, gated norms, rotation of q alone, latent attention, state spaces, encoders, images
FAMILIES = {
    ("causal", "gemma4_text"): {"apply_rope", "rms_norm", "geglu", "linear_cross_entropy"},
    ("causal", "nanochat"): {"apply_rope", "rms_norm", "linear_cross_entropy"},
    ("causal", "qwen3_next"): {*DELTA_RULE, "apply_rope", "swiglu", "experts"},
    ("causal", "qwen4_exp_text"): {*DELTA_RULE, "apply_rope", "swiglu", "experts"},
    ("causal", "deepseek_v3"): {"apply_rope", "rms_norm", "swiglu", "experts", "linear_cross_entropy"},
    ("causal", "mamba2"): {*MIXER, "ssd"},
    ("causal", "bart"): {"layer_norm"},
    ("image-text", "paligemma"): {"apply_rope", "rms_norm", "layer_norm", "geglu", "linear_cross_entropy"},
}


@pytest.mark.parametrize(("kind", "model_type"), FAMILIES, ids=str)
def test_a_family_computes_the_same_with_kernels(kind, model_type):
    if model_type not in MAPPINGS[kind][1]:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    result = check_family(kind, model_type)
    assert result.outcome == "same", result
    assert result.kernels.keys() == FAMILIES[kind, model_type]


def patched_wrongly(model):
    report = family_check_patch(model)
    next(module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm").variance_epsilon *= 1e4
    return report


def refusing(model):
    raise KeyError("rotary")


family_check_patch = family_check.patch


@pytest.mark.parametrize(("patch", "outcome"), [(patched_wrongly, "differs"), (refusing, "crashes")])
def test_a_wrong_patch_is_noticed(patch, outcome, monkeypatch):
    monkeypatch.setattr(family_check, "patch", patch)
    assert check_family("causal", "llama").outcome == outcome


def state(left=0, present=True, **applied):
    return LayerState(applied, left, "2 Layer: another eps" if left else "", present)


def test_the_script_counts_dense_causal_families_that_lack_a_kernel():
    script = script_module("generated_pages.families_page")
    whole = {
        "norm": state(rms_norm=5), "rope": state(apply_rope=2), "MLP": state(swiglu=2),
        "mixer": state(gated_delta_rule=1), "loss": state(linear_cross_entropy=1),
    }  # fmt: skip
    kinds = {
        "whole": whole,
        "left": whole | {"norm": state(left=2, layer_norm=1)},
        "not_found": whole | {"rope": state()},
        "mixture": whole | {"MLP": state(left=1, experts=2)},
        "left_mixture": whole | {"MLP": state(left=1, experts=0)},
        "plain_mlp": whole | {"MLP": state(present=False)},
        "no_mixer": whole | {"mixer": state(present=False)},
        "no_rope": whole | {"rope": state(present=False), "loss": state(left=1)},
    }
    results = [FamilyResult("causal", name, "Model", "same", layers=layers) for name, layers in kinds.items()]
    results += [
        FamilyResult("image-text", "images", "Model", "same", layers=kinds["left"]),
        FamilyResult("causal", "broken", "Model", "crashes", "KeyError"),
    ]
    assert script.headline(results) == (
        "Of 4 dense causal families with norms, RoPE and a gated MLP, 2 (50 %) have all of their norms, RoPE, MLPs and "
        "the loss patched; the others lack:\n\n- `left`: norm: 2 Layer: another eps\n- `not_found`: rope: not found"
    )
    cells = "layer_norm 1, 2 left", "apply_rope 2", "swiglu 2", "gated_delta_rule 1", "linear_cross_entropy 1"
    assert f"| {' | '.join(cells)} |" in script.page(results)
    assert "| `broken` | causal | Model |  |  |  |  |  | 0e+00 | crashes | KeyError |" in script.page(results)


def test_a_rotation_that_is_not_found_is_not_absent():
    model = tiny_models.make("llama")
    states = layer_states(model, PatchReport((KernelLine("swiglu", 2, 1, "1 Layer: odd"), LOSS), "reference"))
    assert states["rope"] == LayerState(present=True)
    assert states["norm"] == LayerState()
    assert (str(states["MLP"]), states["MLP"].why) == ("swiglu 2, 1 left", "1 Layer: odd")
    plain = KernelLine("swiglu", 0, 0, "2 Layer: not gated"), KernelLine("apply_rope", 0, 0, "none found"), LOSS
    states = layer_states(model, PatchReport(plain, "reference"))
    assert (str(states["MLP"]), states["MLP"].present, states["rope"].not_needed) == ("not needed", False, False)
    made = layer_states(model, PatchReport((LOSS,), "reference"), logits_are_made=True)["loss"]
    assert (made.patched, made.why) == (False, "logits are made")


LOSS = KernelLine("linear_cross_entropy", 1, 0, "")


def test_a_family_that_cannot_be_built_has_the_reason():
    result = check_family("image-text", "vision-encoder-decoder")
    assert (result.outcome, bool(result.note)) == ("not built", True)


def test_the_page_has_every_family_and_none_that_differs():
    """The page is of one version of transformers: another has other families."""
    text = PAGE.read_text(encoding="utf-8")
    counts = re.search(r"(\d+) entries: (\d+) the same with kernels, 0 different, 0 crashed, (\d+) not built", text)
    entries, same, missing = map(int, counts.groups())
    assert entries == same + missing == text.count("\n| `") and same > 8 * missing
    if f"transformers {transformers.__version__}," in text:
        assert entries == sum(len(names) for _, names in MAPPINGS.values())
