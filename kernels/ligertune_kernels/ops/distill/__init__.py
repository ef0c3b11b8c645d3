"""Divergences for distillation."""
