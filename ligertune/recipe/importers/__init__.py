"""Import recipes of other tools."""
