"""The command line: one file per command, and render, the only file that prints."""
