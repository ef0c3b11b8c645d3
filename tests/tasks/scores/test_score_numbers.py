"""Places, losses and measures of scores against numbers by hand."""
