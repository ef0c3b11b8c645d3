"""Distillation from a model and from files against distributions by hand."""
