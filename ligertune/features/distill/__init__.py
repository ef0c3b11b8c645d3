"""Distillation: a student learns the next-token distributions of a frozen teacher."""
