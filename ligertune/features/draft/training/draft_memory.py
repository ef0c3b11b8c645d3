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
from ligertune.features.draft.training.draft_loss import CHUNK_BYTES, LossKind
from ligertune.planning.memory.model_shape import AddedHeadsShape, AddedLayerBytes

# Tensors of a chunk that are alive at a time, in float32, besides the head's logits in their own dtype. Counted with
# tests/support/storages.py.
STEP_COPIES = {"eagle": 2.0, "kl": 2.0, "acceptance": 2.75}  # (K, n, D): log q, q; those that grow with q, and a mask
DRAFTED_COPIES = 5  # (n, D): the target's logits, p, log p_D, p_D and their product
TEACHER_COPIES = 3  # (n, V): the target's logits, scaled, their exponentials


@dataclass(frozen=True)
class DraftLayersShape(AddedHeadsShape):
    """The draft head: its sizes, and the steps of its training."""

    draft: DraftConfig
    steps: int  # K
    loss: LossKind
    recomputes: bool

    @property
    def needs_fused_loss(self) -> bool:
        return False

    @property
    def predicts_shards(self) -> bool:
        return True

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
        loss = self._loss_bytes(rows, itemsize) + 2 * rows * hidden * itemsize
        # gradients of about half of what a step keeps are alive at a time
        backward = round((0.5 + self.recomputes) * layer * tokens * itemsize)
        return AddedLayerBytes(captured=2 * states, held=held, loss=loss, backward=backward)

    def _loss_bytes(self, rows: int, itemsize: int) -> int:
        """Return the bytes of the logits of one chunk, of the head or of the target before them."""
        draft_vocab = self.draft.draft_vocab_size
        chunk = min(CHUNK_BYTES, 4 * rows * draft_vocab)
        n_rows = chunk // (4 * self.steps * draft_vocab)
        head = round(chunk * (STEP_COPIES[self.loss] + itemsize / 4)) + 4 * DRAFTED_COPIES * n_rows * draft_vocab
        teacher = n_rows * self.draft.vocab_size * (itemsize + 4 * TEACHER_COPIES)
        return max(head, teacher)
