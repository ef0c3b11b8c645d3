"""Batches of KTO on a tiny model against its definition, written out in float64."""
