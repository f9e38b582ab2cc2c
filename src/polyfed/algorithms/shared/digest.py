"""Digests: a client fits its model's outputs on public samples to outputs that it received."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from polyfed.algorithms.algorithm import Client
from polyfed.algorithms.shared.public_exchange import PublicExchange, row_shares
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Samples
from polyfed.federation.public_outputs import modality_of
from polyfed.losses.distillation import DISTILLATIONS, Distillation
from polyfed.models.model import Model


class Digest(Settings):
    """A digest by gradient steps."""

    epochs: int = Field(default=1, ge=1, description="passes over the exchanged samples")
    loss: Distillation = Field(default="l1", description="distance to what is digested")
    batch_size: int = Field(default=128, ge=2, description="public samples a step")

    def require(self, public: PublicExchange) -> None:
        """Check that the distance suits what crosses.

        Raises:
            ConfigError: it does not.
        """
        if self.loss == "kl" and not public.exchanges_scores:
            raise ConfigError(
                "algorithm.digest.loss is kl, which compares class scores, not representations; choose l1 or cosine"
            )

    def fit(self, client: Client, public: PublicExchange, goals: Mapping[str, Tensor]) -> None:
        """Passes over the exchanged samples, each step on the sum over modalities of the mean distance to the goals.

        Goals are output -> [n, w]; rows of zeros are no goal, nor are outputs that the client has not.
        """
        goals = {name: goals[name] for name in public.kind.channels(client.info, list(goals))}
        if not goals:
            return
        samples, trainer, distance = public.drawn(client), client.trainer(), DISTILLATIONS[self.loss]
        valid = {name: values.any(1) for name, values in goals.items()}
        shares = row_shares(valid)
        for batches in public.part_passes(client, "digest", self.epochs, self.batch_size, samples, goals):
            own = public.part_outputs(client, client.model, batches, goals)
            parts = [
                shares[name] * distance(rows, goals[name][index], valid[name][index])
                for name, (rows, index) in own.items()
            ]
            trainer.step(torch.stack(parts).sum())


def only_layer(model: Model, modality: str) -> nn.Linear | None:
    """The linear layer with a bias that is all that a tower trains, if one is: the tower is linear in its weights."""
    tower = model.tower(modality)
    trained = {id(value) for value in tower.parameters() if value.requires_grad}
    layers = [layer for layer in tower.modules() if isinstance(layer, nn.Linear) and layer.bias is not None]
    return next((layer for layer in layers if trained == {id(value) for value in layer.parameters()}), None)


@torch.no_grad()
def fit_in_closed_form(
    public: PublicExchange, client: Client, modality: str, layer: nn.Linear, goals: Mapping[str, Tensor], penalty: float
) -> None:
    """Set the layer that ends a tower to the ridge regression from its inputs to the goals of its modality.

    In evaluation mode. Goals are output -> [n, d]; rows of zeros are no goal.
    """
    inputs = list[Tensor]()
    targets = [values for name, values in goals.items() if modality_of(name) == modality]
    for name in goals:
        if modality_of(name) == modality:
            samples = client.parts[name] if name in client.parts else public.drawn(client)
            inputs.append(_inputs_of(client, layer, samples, modality))
    features, goal = torch.cat(inputs), torch.cat(targets)
    wanted = goal.any(1)
    if not bool(wanted.any()):
        return
    weight, intercept = ridge_regression(features[wanted], goal[wanted], penalty)
    layer.weight.copy_(weight.T)
    layer.bias.copy_(intercept)


def _inputs_of(client: Client, layer: nn.Linear, samples: Samples, modality: str) -> Float[Tensor, "n f"]:
    """What the layer gets for each sample."""
    seen = list[Tensor]()
    handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].float()))
    try:
        # each distinct row is encoded once, but counts as often as it stands among the samples
        _, places = client.represent_distinct(samples, modality)
    finally:
        handle.remove()
    return torch.cat(seen)[places]


def ridge_regression(
    inputs: Float[Tensor, "n f"], goal: Float[Tensor, "n d"], penalty: float
) -> tuple[Float[Tensor, "f d"], Float[Tensor, " d"]]:
    """W and b that minimise ||X W + b - Z||^2 + penalty n v ||W||^2, v being the mean variance of the inputs.

    The intercept is free. As the penalty is relative to the inputs' own scale, one value suits all backbones.
    """
    x, z = inputs.double(), goal.double()
    x_mean, z_mean = x.mean(0), z.mean(0)
    x = x - x_mean
    gram = x.T @ x
    # never zero, or inputs without variance would leave nothing to solve for
    scale = (gram.trace() / len(gram)).clamp_min(torch.finfo(torch.float32).tiny)
    gram.diagonal().add_(penalty * scale)
    weight = torch.linalg.solve(gram, x.T @ (z - z_mean))
    return weight.to(goal.dtype), (z_mean - x_mean @ weight).to(goal.dtype)
