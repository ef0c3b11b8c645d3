"""Bundled recipes and the configurations of their models, which the recipes benchmark runs."""

# recipe -> configuration of its model. These train a whole model, or heads that a later recipe of the list loads.
WHOLE = {
    "llama/llama-3-8b-alpaca-one-gpu": "Meta-Llama-3-8B",
    "gemma/gemma-7b-alpaca-one-gpu": "gemma-7b",
    "mistral/mistral-7b-alpaca-one-gpu": "Mistral-7B-v0.1",
    "qwen/qwen2-7b-alpaca-one-gpu": "Qwen2-7B",
    "medusa/llama-3-8b-3-heads": "Meta-Llama-3-8B",
    "medusa/llama-3-8b-3-heads-stage2": "Meta-Llama-3-8B",
    "medusa/llama-3-8b-5-heads": "Meta-Llama-3-8B",
    "medusa/llama-3-8b-5-heads-stage2": "Meta-Llama-3-8B",
    "medusa/qwen2.5-7b": "Qwen2.5-7B",
    "medusa/qwen2.5-7b-stage2": "Qwen2.5-7B",
}
OTHERS = {
    "llama/llama-3-8b-alpaca-lora": "Meta-Llama-3-8B",
    "llama/llama-3.2-1b-alpaca": "Llama-3.2-1B",
    "qwen2_vl/qwen2-vl-2b-llava": "Qwen2-VL-2B-Instruct",
    "qwen2_vl/qwen2-vl-7b-llava": "Qwen2-VL-7B-Instruct",
}
SEVERAL = {
    "llama/llama-3-8b-alpaca": "Meta-Llama-3-8B",
    "llama/llama-3-8b-alpaca-h100": "Meta-Llama-3-8B",
    "gemma/gemma-7b-alpaca": "gemma-7b",
    "mistral/mistral-7b-alpaca": "Mistral-7B-v0.1",
    "qwen/qwen2-7b-alpaca": "Qwen2-7B",
}
