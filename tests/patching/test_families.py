"""Families of transformers that no other test builds: with kernels they compute what they do without."""

import re

import family_check
import pytest
import transformers
from command_line import ROOT
from family_check import check_family
from tiny_families import MAPPINGS

PAGE = ROOT / "docs" / "families.md"
# Norms without a weight, gated norms, rotation of q alone, latent attention, state spaces, encoders, images
FAMILIES = {
    ("causal", "gemma4_text"): {"rms_norm", "geglu", "linear_cross_entropy"},
    ("causal", "nanochat"): {"rms_norm", "linear_cross_entropy"},
    ("causal", "qwen3_next"): {"apply_rope", "rms_norm", "swiglu", "experts", "linear_cross_entropy"},
    ("causal", "qwen4_exp_text"): {"apply_rope", "rms_norm", "swiglu", "experts", "linear_cross_entropy"},
    ("causal", "deepseek_v3"): {"rms_norm", "swiglu", "experts", "linear_cross_entropy"},
    ("causal", "mamba2"): {"rms_norm", "linear_cross_entropy"},
    ("causal", "bart"): {"layer_norm"},
    ("image-text", "paligemma"): {"apply_rope", "rms_norm", "layer_norm", "geglu", "linear_cross_entropy"},
}


@pytest.mark.parametrize(("kind", "model_type"), FAMILIES, ids=str)
def test_a_family_computes_the_same_with_kernels(kind, model_type):
    if model_type not in MAPPINGS[kind][1]:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    result = check_family(kind, model_type)
    assert result.outcome == "same", result
    assert {name.split()[0] for name in result.kernels.split(", ")} == FAMILIES[kind, model_type]


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
