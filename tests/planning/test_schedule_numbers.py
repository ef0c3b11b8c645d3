"""Intervals, rates and decays of the plan against numbers by hand."""
