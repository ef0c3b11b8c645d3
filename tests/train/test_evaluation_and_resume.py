"""Evaluations, best weights, early stopping and counted work, in one run and in a resumed one."""
