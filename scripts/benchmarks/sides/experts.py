"""Sides of the experts benchmark: how ligertune, transformers and other libraries compute a layer's experts."""

from __future__ import annotations

import importlib

from benchmarks.tables.expert_shapes import Shape
from benchmarks.tables.moe_models import config_of

OURS = {
    "ligertune": None,
    "ligertune, grouped_mm": "grouped_mm",
    "ligertune, triton": "triton",
    "ligertune, loop": "loop",
}
TRANSFORMERS = {"eager": "eager", "grouped_mm": "grouped_mm", "sonicmoe": "sonicmoe"}
NEEDS = {"liger": "liger_kernel", "sonicmoe": "sonicmoe", "scattermoe": "scattermoe"}  # side -> package
SIDES = (*OURS, "grouped_mm", "eager", "liger", "sonicmoe", "scattermoe")
LIGER = {"mixtral": "apply_liger_kernel_to_mixtral", "qwen3": "apply_liger_kernel_to_qwen3_moe"}


def layer_of(side: str, name: str, shape: Shape, device: str, dtype):
    """Return (the experts' module, what computes it). Weights are random, with variance 1 / inputs."""
    import torch
    import transformers

    if side == "liger":
        import liger_kernel.transformers as liger

        if name not in LIGER:
            raise ValueError("liger-kernel documents no function for this family")
        getattr(liger, LIGER[name])(rope=False, rms_norm=False, cross_entropy=False, fused_linear_cross_entropy=False,
                                    swiglu=True)  # fmt: skip
    file, _, cls = shape.experts.rpartition(".")
    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.mlp, "moe_intermediate_size": shape.mlp,
             "num_experts_per_tok": shape.chosen, "n_routed_experts": shape.number, "num_local_experts": shape.number,
             "num_experts": shape.number}  # fmt: skip
    known = vars(config_of(shape.model)) | dict.fromkeys(("num_local_experts", "n_routed_experts"))
    config = config_of(shape.model, **{key: size for key, size in sizes.items() if key in known})
    config._experts_implementation = TRANSFORMERS.get(side, "eager")
    modeling = importlib.import_module(f"transformers.models.{file}")
    with torch.device(device):
        module = getattr(modeling, cls)(config).to(dtype)
    if side == "liger" and "liger" not in type(module).__module__ + type(module).forward.__module__:
        raise ValueError(f"liger-kernel leaves {cls} of transformers {transformers.__version__} as it is")
    generator = torch.Generator(device).manual_seed(0)
    for weight in module.parameters():
        for part in weight.data:  # of a whole weight over 2**31 bytes, each dtype would get other numbers
            part.normal_(0, shape.hidden**-0.5, generator=generator)
    return module, function_of(side, module, shape)


def function_of(side: str, module, shape: Shape):
    """Return a function of hidden, index and weights that computes the experts as this side does."""
    if side == "scattermoe":
        return scattermoe(module, shape)
    if side not in OURS:
        return module
    from ligertune_kernels.ops.moe.experts import ExpertProjection, experts

    from ligertune.patching.experts.recognise_experts import ExpertsSpec, recognise_class

    spec = recognise_class(module)
    if not isinstance(spec, ExpertsSpec):
        raise ValueError(f"not recognised: {spec.reason}")
    gate_up, down = (
        ExpertProjection(getattr(module, name), getattr(module, f"{name}_bias", None))
        for name in ("gate_up_proj", "down_proj")
    )
    return lambda hidden, index, weights: experts(
        hidden, index, weights, gate_up, down,
        activation=spec.activation, layout=spec.layout, products=OURS[side],
    )  # fmt: skip


def scattermoe(module, shape: Shape):
    """Return ScatterMoE's gated MLP with weights of its own: it is timed, and its error is not comparable."""
    import torch
    from scattermoe.mlp import GLUMLP

    weight = module.down_proj
    if getattr(module, "gate_up_proj_bias", None) is not None:
        raise ValueError("ScatterMoE has no biases")
    mlp = GLUMLP(input_size=shape.hidden, hidden_size=shape.mlp, num_experts=len(weight), top_k=shape.chosen,
                 activation=torch.nn.SiLU()).to(weight.device, weight.dtype)  # fmt: skip
    module.others = mlp
    return lambda hidden, index, weights: mlp(hidden, weights, index)


def parameters_of(side: str, module):
    return module.others.parameters() if side == "scattermoe" else module.parameters()
