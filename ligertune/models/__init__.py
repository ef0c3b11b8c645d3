"""Models: what they are (`load`, `shape`) and how their layers come to run our kernels (`patch`)."""
