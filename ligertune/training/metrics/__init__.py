"""Measurements of a run: work, time and memory, and the lines of metrics.jsonl."""
