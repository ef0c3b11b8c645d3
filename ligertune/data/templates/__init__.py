"""Chat templates: render conversations, mask labels, tokenize."""
