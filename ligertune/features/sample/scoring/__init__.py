"""Scores of sampled answers: a user's functions in a process of their own, and a model that was trained to score."""
