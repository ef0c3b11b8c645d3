"""One op per file: its mathematics, reference, kernels, autograd, function and module."""
