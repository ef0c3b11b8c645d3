"""Prediction of a step's time, and the choice of the settings that a recipe leaves open."""
