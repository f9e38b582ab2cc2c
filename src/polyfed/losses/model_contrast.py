"""The model-contrastive loss of MOON (Li et al., CVPR 2021, Eq. 3)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.contrast import intra_modal
from polyfed.losses.precision import in_full_precision


@in_full_precision
def model_contrast(
    z: Float[Tensor, "b d"],
    received: Float[Tensor, "b d"],
    previous: Float[Tensor, "b d"],
    tau: float = 0.5,
) -> Float[Tensor, ""]:
    """Contrast towards what the received model sees, away from what the client's previous one saw, mean over b.

    -log exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau) + exp(cos(z, z_prev) / tau)), which is
    softplus((cos(z, z_prev) - cos(z, z_glob)) / tau): CreamFL's Eq. 2 on vectors of any length. Gradient to ``z`` only.

    Args:
        z: of the model in training.
        received: z_glob, of the model that the server sent.
        previous: z_prev, of the client's model at the end of its previous participation.
        tau: temperature.
    """
    unit, towards, away = (F.normalize(values, dim=1) for values in (z, received, previous))
    return intra_modal(unit, towards, away, tau)
