"""Sequence classification and reward models: a score head reads each text at its last token."""
