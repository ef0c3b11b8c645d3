"""Attention: choose an implementation; packed documents, context parallelism, flash attention."""
