"""Decoding with a draft head: drafts, their acceptance, answers, measurements."""
