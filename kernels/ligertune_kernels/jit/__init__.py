"""Triton device functions shared by several kernels."""
