"""Other ops: embedding, low-bit matrix multiplication, optimizer step."""
