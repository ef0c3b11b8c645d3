"""Checkpoints: write, verify, load, reshard, export."""
