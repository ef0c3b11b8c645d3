"""Mixers of hybrid models: their sizes, and the parameters of their decays."""
