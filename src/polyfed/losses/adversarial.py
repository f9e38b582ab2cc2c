"""Adversarial alignment: a discriminator separates representations, an encoder mixes them (BAA of FedAFD, CVPR 2026).

The global representations are real, the client's own fake. All losses take logits, so log D(x) = -softplus(-logit).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision

EncoderForm = Literal["minimax", "non_saturating"]


class Discriminator(nn.Module):
    """MLP with leaky ReLUs that scores representations: high for global (real) ones, low for local (fake) ones.

    Args:
        dim: Width d of the representations.
        hidden: Widths of the hidden layers (FedAFD, supplement A.2.1); wider ones separate more.
        slope: Slope of the leaky ReLUs below zero; 0 makes them plain, 1 linear.
        double_sigmoid: Returns probabilities, as FedAFD's released code does, although its loss takes logits. Read as
            logits they confine the loss of a real sample to (0.313, 0.693), of a fake one to (0.693, 1.313).

    >>> discriminator = Discriminator(dim=4)
    >>> discriminator(torch.zeros(3, 4)).shape
    torch.Size([3])
    """

    def __init__(
        self, dim: int, hidden: Sequence[int] = (128, 64), slope: float = 0.2, *, double_sigmoid: bool = False
    ) -> None:
        super().__init__()
        widths = (dim, *hidden)
        inner = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.LeakyReLU(slope))]
        self.layers = nn.Sequential(*inner, nn.Linear(widths[-1], 1))
        self.double_sigmoid = double_sigmoid

    def forward(self, x: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """Logits of being real; probabilities with ``double_sigmoid``."""
        logits: Tensor = self.layers(x).squeeze(-1)
        return torch.sigmoid(logits) if self.double_sigmoid else logits


def discriminator_loss(
    discriminator: nn.Module, real: Float[Tensor, "r d"], fake: Float[Tensor, "f d"]
) -> Float[Tensor, ""]:
    """-E[log D(real)] - E[log(1 - D(fake))], the loss of a discriminator; gradient to its parameters only.

    The paper's discriminators maximise L_adv, the negative of this. One of several terms (D_in, D_cr): add them up.

    Args:
        discriminator: Maps representations to logits.
        real: Global representations; constants.
        fake: The client's representations; constants, in any number.

    Raises:
        ValueError: Real or fake representations are missing.

    >>> identity = nn.Flatten(0)  # representations of width 1, which are their own logits
    >>> round(float(discriminator_loss(identity, real=torch.full((2, 1), 3.0), fake=torch.full((2, 1), -3.0))), 3)
    0.097
    """
    # two passes: in one batch a discriminator with batch norms would mix both
    return separation(discriminator(real.detach()), discriminator(fake.detach()))


def encoder_loss(
    discriminator: nn.Module, real: Float[Tensor, "r d"], fake: Float[Tensor, "f d"], form: EncoderForm = "minimax"
) -> Float[Tensor, ""]:
    """Loss of an encoder that imitates the global model; gradient to ``fake`` only.

    Args:
        discriminator: Maps representations to logits; a constant here.
        real: Global representations; constants.
        fake: The client's representations, with their graph.
        form: ``minimax``, L_adv of the paper, or ``non_saturating``, as released.

    Raises:
        ValueError: Fake representations are missing, or real ones for ``minimax``.

    >>> identity, real = nn.Flatten(0), torch.full((2, 1), 3.0)
    >>> fakes = torch.full((2, 1), -3.0), torch.full((2, 1), 3.0)
    >>> [round(float(encoder_loss(identity, real, fake, "non_saturating")), 3) for fake in fakes]
    [3.049, 0.049]
    """
    return ENCODER_FORMS[form](frozen_output(discriminator, real.detach()), frozen_output(discriminator, fake))


@in_full_precision
def separation(real: Float[Tensor, " r"], fake: Float[Tensor, " f"]) -> Float[Tensor, ""]:
    """Binary cross-entropy of the logits with label 1 for real and 0 for fake ones, each averaged, then added.

    >>> round(float(separation(torch.tensor([0.0]), torch.tensor([0.0]))), 3)
    1.386
    """
    # softplus, as the logarithm of a sigmoid underflows
    return F.softplus(-_some(real, "real")).mean() + F.softplus(_some(fake, "fake")).mean()


@in_full_precision
def minimax(real: Float[Tensor, " r"], fake: Float[Tensor, " f"]) -> Float[Tensor, ""]:
    """E[log D(real)] + E[log(1 - D(fake))] (FedAFD, L_in and L_cr): the negative of ``separation``.

    To an encoder the first term is a constant. Where the discriminator is sure of a fake, the gradient vanishes.

    >>> round(float(minimax(torch.tensor([0.0]), torch.tensor([0.0]))), 3)
    -1.386
    """
    return -separation(real, fake)


@in_full_precision
def non_saturating(real: Float[Tensor, " r"], fake: Float[Tensor, " f"]) -> Float[Tensor, ""]:
    """-E[log D(fake)] (Goodfellow et al., NeurIPS 2014), as FedAFD's released code; blind to the real logits.

    Its gradient is largest where the discriminator is sure of a fake.

    >>> round(float(non_saturating(torch.tensor([0.0]), torch.tensor([-5.0]))), 3)
    5.007
    """
    return F.softplus(-_some(fake, "fake")).mean()


ENCODER_FORMS: Mapping[EncoderForm, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"minimax": minimax, "non_saturating": non_saturating}
)
"""The encoder's losses on logits (real, fake) by name."""


def frozen_output(module: nn.Module, x: Tensor) -> Tensor:
    """Output of ``module`` for ``x``, with its parameters as constants of this call.

    ``requires_grad`` stays as it is, so that an error leaves no trace, and autocast keeps no copy of a weight that a
    later, unfrozen call would use.

    >>> layer, x = nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True)
    >>> frozen_output(layer, x).sum().backward()
    >>> layer.weight.grad is None, x.grad is None
    (True, False)
    """
    # of parameters alone: buffers are the module's own, and a batch norm's would move
    constants = {name: value.detach() for name, value in module.named_parameters()}
    output: Tensor = functional_call(module, constants, (x,))
    return output


def _some(logits: Tensor, side: str) -> Tensor:
    if logits.numel() == 0:
        raise ValueError(f"adversarial loss without {side} representations; both sides need at least one")
    return logits
