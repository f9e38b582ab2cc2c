"""PIE: local features attend their way into a pooled embedding (PVSE; Song and Soleymani, CVPR 2019)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class PIE(nn.Module):
    """One-head attention over local features, added to a pooled embedding, as in CreamFL and FedAFD.

    ``LayerNorm(out + sigmoid(fc(sum_l a_l x_l)))`` with ``a = softmax_l(w2 tanh(w1 x))``; not L2-normalised,
    which ``Model.represent`` does.

    Args:
        in_dim: width of the local features.
        dim: width d of the embedding.
        hidden: width of the attention; half of ``in_dim`` by default.
    """

    def __init__(self, in_dim: int, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or max(1, in_dim // 2)
        self.w1 = nn.Linear(in_dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, 1, bias=False)
        self.fc = nn.Linear(in_dim, dim)
        self.norm = nn.LayerNorm(dim)
        for layer in (self.w1, self.w2, self.fc):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(
        self,
        out: Float[Tensor, "b d"],
        local: Float[Tensor, "b l c"],
        mask: Bool[Tensor, "b l"] | None = None,
    ) -> Float[Tensor, "b d"]:
        """Embedding from the pooled, projected ``out`` and the local features; ``mask`` is true where valid.

        A row without a valid position attends evenly, so it stays finite.
        """
        attention = self.attention(local, mask)
        attended = (attention.unsqueeze(1) @ local).squeeze(1)
        embedding: Tensor = self.norm(out + torch.sigmoid(self.fc(attended)))
        return embedding

    def attention(self, local: Float[Tensor, "b l c"], mask: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b l"]:
        """Attention weights; each row sums to one over its valid positions."""
        scores: Tensor = self.w2(torch.tanh(self.w1(local))).squeeze(-1).float()
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1).to(local.dtype)
