"""Attention ops: rotary embedding, attention within packed documents."""
