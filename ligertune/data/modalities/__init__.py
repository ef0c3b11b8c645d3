"""Modalities: what models read besides text. Each is a folder; `modality.py` says what it offers to other code."""
