"""The moe_whole benchmark: its model, sides and adapters."""

MODEL = "qwen3-30b-a3b"
SIDES = ("ligertune bf16", "ligertune 4-bit", "hf_peft bf16", "hf_peft 4-bit")
STEPS, WARMUP = 5, 2
RANK, ALPHA = 16, 32
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
