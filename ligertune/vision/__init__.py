"""Vision-language models: supported families, reading images, image inputs of a batch, and freezing parts."""
