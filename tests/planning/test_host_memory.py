"""The warning about host memory against numbers by hand."""
