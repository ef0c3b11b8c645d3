"""Numbers of the report and of its charts against numbers by hand."""
