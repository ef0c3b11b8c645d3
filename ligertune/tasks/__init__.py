"""Training tasks: the batch fields, the loss and the report of each."""
