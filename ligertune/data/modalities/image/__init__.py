"""Images: recipe section, rows, files, inputs of a batch, frozen parts and memory of vision-language models."""
