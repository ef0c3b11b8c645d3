"""Gated MLPs: recognition, and the mixins that compute them with our kernels."""
