"""Memory of FlashAttention-4's backward, which `ligertune.attention.flash_4` runs for rows of long documents."""

# The attention's name in transformers, which would look for a package if it contained "flash".
FA4_OR_DOCUMENT_ATTENTION = "fa4_or_document_attention"
MOST_SUMS = 3 << 29  # bytes; document_attention runs rows whose backward would need more


def flash_4_memory(n_tokens: int, heads: int, key_heads: int, width: int) -> int:
    """Return the bytes of the fp32 sums: of dq, and of dk and dv if query heads share key heads."""
    return n_tokens * width * 4 * (heads + (2 * key_heads if heads != key_heads else 0))
