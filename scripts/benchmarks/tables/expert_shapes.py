"""Shapes of the experts benchmark: one layer's experts of published mixtures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of the experts of a layer."""

    model: str  # in moe_models.py
    experts: str  # modeling module of transformers and the class of its experts
    number: int  # X
    chosen: int  # K
    hidden: int  # E
    mlp: int  # F

    def flops(self, tokens: int) -> float:
        """Return the FLOPs of the products, forward and backward: 3 weights, 2 each, and twice that backward."""
        return 18.0 * tokens * self.chosen * self.hidden * self.mlp


SHAPES = {
    "mixtral": Shape("mixtral-8x7b", "mixtral.modeling_mixtral.MixtralExperts", 8, 2, 4096, 14336),
    "qwen3": Shape("qwen3-30b-a3b", "qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts", 128, 8, 2048, 768),
    "gpt_oss": Shape("gpt-oss-20b", "gpt_oss.modeling_gpt_oss.GptOssExperts", 32, 4, 2880, 2880),
    "deepseek": Shape("deepseek-v3-small", "deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts", 256, 8, 7168, 2048),
}
