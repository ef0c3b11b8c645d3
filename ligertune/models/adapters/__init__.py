"""Adapters: LoRA on linear layers and on experts, with peft."""
