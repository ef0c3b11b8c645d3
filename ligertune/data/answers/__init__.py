"""Answers in rendered conversations: where they are, and their reasoning."""
