"""Serve a model: an OpenAI-style endpoint to try it with a client, and the commands of other servers."""
