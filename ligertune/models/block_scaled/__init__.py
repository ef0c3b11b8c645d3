"""Bases in MXFP4 and block float8: trained on and exported without 16-bit copies."""
