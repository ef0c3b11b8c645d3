"""Checks that packed documents stay apart in a model, whatever its attention."""
