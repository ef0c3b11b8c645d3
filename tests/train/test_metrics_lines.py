"""Lines of metrics.jsonl against counts by hand."""
