"""Files of draft heads: layouts of servers, model card, check."""
