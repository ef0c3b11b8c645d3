"""Patching: recognise a module's computation by running it, and replace it by our kernels."""
