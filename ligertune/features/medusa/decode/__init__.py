"""Decoding with Medusa heads: candidates in a tree, their acceptance, answers."""
