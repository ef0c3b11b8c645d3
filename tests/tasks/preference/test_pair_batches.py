"""Batches of pairs on a tiny model against TRL's definitions, written out in float64."""
