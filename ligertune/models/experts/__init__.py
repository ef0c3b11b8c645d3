"""Mixtures of experts: sizes of experts and routers, and the load of each expert."""
