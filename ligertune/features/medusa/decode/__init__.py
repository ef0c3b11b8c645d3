"""Decoding with Medusa heads: their candidates in a tree, answers."""
