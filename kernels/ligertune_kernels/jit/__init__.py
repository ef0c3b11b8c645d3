"""Triton functions shared by several kernels."""
