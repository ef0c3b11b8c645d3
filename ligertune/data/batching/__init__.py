"""Batching: pack, order and collate examples into micro-batches."""
