"""Data rows: read files and turn each row into a conversation."""
