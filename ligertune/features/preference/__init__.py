"""Preference optimisation: DPO and its variants, ORPO, SimPO and KTO."""
