"""Kimi's delta attention: the gated delta rule with a decay for each key channel."""
