"""Memory of a draft head: what its steps keep for the backward, and what its loss makes.

Elements per token and step that autograd keeps of a decoder layer, counted under Triton's interpreter:

    7 E     the layer's two inputs, both normed in one tensor (2 E), the sum after attention, that normed, the output
    3 Q     rotated queries, the output of packed attention, the same merged with that to own keys
    2 P     rotated keys, values
    3 F     gate, up, their product

Recomputed layers keep their inputs and the keys and values that later steps read, 3 E + 2 P, and in the backward all of
one step. The loss reads K M rows of E elements, and makes logits in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligertune.features.draft.draft_config import DraftConfig
from ligertune.features.draft.training.draft_loss import CHUNK_BYTES
from ligertune.planning.memory.model_shape import AddedHeadsShape, AddedLayerBytes

CHUNK_COPIES = 8  # tensors of a chunk's logits in float32 that are alive at a time, with their gradients
TEACHER_COPIES = 3  # the same of the target's logits: rounded, in float32, their exponentials


@dataclass(frozen=True)
class DraftLayersShape(AddedHeadsShape):
    """The draft head: its sizes, and the steps of its training."""

    draft: DraftConfig
    steps: int  # K
    recomputes: bool

    @property
    def needs_fused_loss(self) -> bool:
        return False

    def layer_bytes(self, tokens: int, labels: int, itemsize: int) -> AddedLayerBytes:
        """Return the bytes of K steps on these tokens, of which `labels` predict a label."""
        draft = self.draft
        hidden = draft.hidden_size
        queries = draft.num_attention_heads * draft.head_dim
        keys = draft.num_key_value_heads * draft.head_dim
        layer = 7 * hidden + 3 * queries + 2 * keys + 3 * draft.intermediate_size
        layer *= draft.num_layers
        kept = (3 * hidden + 2 * keys) * draft.num_layers if self.recomputes else layer
        states = len(draft.layer_ids) * hidden * tokens * itemsize
        rows = self.steps * labels
        held = states + self.steps * kept * tokens * itemsize
        # hidden states that enter the loss, and their gradients
        held += 2 * rows * hidden * itemsize + 4 * draft.draft_vocab_size * hidden
        chunk = min(CHUNK_BYTES, 4 * rows * draft.draft_vocab_size)
        chunk_rows = chunk // (4 * self.steps * draft.draft_vocab_size)
        loss = CHUNK_COPIES * chunk + TEACHER_COPIES * 4 * chunk_rows * draft.vocab_size
        loss += 2 * rows * hidden * itemsize + draft.draft_vocab_size * hidden * itemsize
        return AddedLayerBytes(
            captured=2 * states, held=held, loss=loss, backward=layer * tokens * itemsize * (1 + self.recomputes)
        )
