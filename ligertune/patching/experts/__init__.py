"""Experts of a mixture: recognise them, compute them by our op, and register it with transformers."""
