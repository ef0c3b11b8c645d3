"""Scales of float8 tensors over steps, evaluations and resumes, against the formula."""
