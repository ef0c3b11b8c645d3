"""How answers grow: settings, ends, the choice of tokens, and slots that are refilled."""
