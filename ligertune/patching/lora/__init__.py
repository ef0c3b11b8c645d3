"""LoRA layers of PEFT: the update inside the matrix multiplication, and inside the loss of the output head."""
