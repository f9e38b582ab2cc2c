"""RCSR's router: weights of clients in an average, learnt from how well their prototypes go together."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class Router(nn.Module):
    """Weights of k clients by what is known of each: tokens, self-attention among them, softmax.

    All weigh alike at first.

    Args:
        features: f, numbers that are known of a client.
        width: of a token; a multiple of 4, the number of heads.
        layers: of attention.
    """

    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Sequential(nn.Linear(features, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width))
        self.attention = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
                for _ in range(layers)
            )
        )
        self.score = nn.Linear(width, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def forward(self, clients: Float[Tensor, "k f"]) -> Float[Tensor, " k"]:
        scores: Tensor = self.score(self.attention(self.token(clients).unsqueeze(0)))
        return scores.flatten().softmax(0)


def client_features(
    prototypes: Float[Tensor, "k 2 d"],
    has: Float[Tensor, "k 2"],
    losses: Float[Tensor, " k"],
    update_norms: Float[Tensor, "k 2"],
    samples: Float[Tensor, " k"],
) -> Float[Tensor, "k f"]:
    """What the router sees of each client; f = 2 d + 7.

    Args:
        prototypes: mean representation of each of two modalities, unit norm; the global one where a client has none.
        has: 1 for a modality that the client has, else 0.
        losses: of its training.
        update_norms: norm of the change of what encodes each modality.
        samples: of its training.
    """
    total = torch.linalg.vector_norm(update_norms, dim=1)
    own = (
        F.cosine_similarity(prototypes[:, 0], prototypes[:, 1], dim=1),
        total.log1p(),
        update_norms[:, 0].square() / total.square().clamp_min(1e-12),  # a ratio has no bound where one is missing
        (total / samples.sqrt()).log1p(),
        losses.clamp_min(0).log1p(),
    )
    return torch.cat([prototypes.flatten(1), torch.stack(own, 1), has], dim=1)


def routing_loss(
    weights: Float[Tensor, " k"],
    prototypes: Float[Tensor, "k 2 d"],
    goal: Float[Tensor, "2 d"],
    entropy: float,
    alignment: float,
) -> Float[Tensor, ""]:
    """How far weighted prototypes are from the global ones, and how much clients disagree on where modalities lie.

    sum_m (1 - cos(sum_k w_k p_km, g_m)) - entropy H(w) + alignment / 2 (1 - cos(a, a_g) + sum_k w_k (1 - cos(a_k, a))),
    with the directions a_k = p_k1 - p_k2, a = sum_k w_k a_k / |a_k| and a_g = g_1 - g_2.

    Args:
        weights: of the clients, summing to 1.
        prototypes: see ``client_features``.
        goal: global prototypes, g.
        entropy: factor of the weights' entropy.
        alignment: factor of the two terms on directions.
    """
    mixed = torch.einsum("k,kmd->md", weights, prototypes)
    consistency = (1 - F.cosine_similarity(mixed, goal, dim=1)).sum()
    disorder = torch.special.entr(weights).sum()
    directions = F.normalize(prototypes[:, 0] - prototypes[:, 1], dim=1)
    common = weights @ directions
    apart = 1 - F.cosine_similarity(common, goal[0] - goal[1], dim=0)
    conflict = (weights * (1 - F.cosine_similarity(directions, common[None], dim=1))).sum()
    loss: Tensor = consistency - entropy * disorder + alignment / 2 * (apart + conflict)
    return loss
