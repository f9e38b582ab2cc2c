"""Digests: a client fits its model's outputs on public samples to outputs that it receives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from polyfed.algorithms.algorithm import Client
from polyfed.algorithms.shared.public_exchange import PublicExchange, modality_of, row_shares
from polyfed.core.settings import Settings
from polyfed.data.samples import Samples
from polyfed.losses.distillation import DISTILLATIONS, Distillation
from polyfed.models.model import Model


class Digest(Settings):
    """A digest by gradient steps."""

    epochs: int = Field(default=1, ge=1, description="passes over the exchanged samples")
    loss: Distillation = Field(default="l1", description="distance to the targets")
    batch_size: int = Field(default=128, ge=2, description="public samples per step")

    def fit(self, client: Client, public: PublicExchange, targets: Mapping[str, Tensor]) -> None:
        """Passes over the exchanged samples, each step on the sum over modalities of the mean distance to the targets.

        Args:
            client: The client that learns.
            public: Settings of the exchange.
            targets: Targets by output, [n, d]; rows of zeros and modalities that the client lacks do not count.
        """
        targets = {name: targets[name] for name in public.names_for(client.info, targets)}
        if not targets:
            return
        samples, trainer, distance = public.drawn(client), client.trainer(), DISTILLATIONS[self.loss]
        valid = {name: values.any(1) for name, values in targets.items()}
        shares = row_shares(valid)
        for batches in public.part_passes(client, "digest", self.epochs, self.batch_size, samples, targets):
            own = public.part_outputs(client, client.model, batches, targets)
            parts = [
                shares[name] * distance(rows, targets[name][index], valid[name][index])
                for name, (rows, index) in own.items()
            ]
            trainer.step(torch.stack(parts).sum())


def only_layer(model: Model, modality: str) -> nn.Linear | None:
    """The only trained layer of a tower, if it is linear with a bias: the tower is then linear in its weights."""
    tower = model.tower(modality)
    trained = {id(value) for value in tower.parameters() if value.requires_grad}
    layers = [layer for layer in tower.modules() if isinstance(layer, nn.Linear) and layer.bias is not None]
    return next((layer for layer in layers if trained == {id(value) for value in layer.parameters()}), None)


@torch.no_grad()
def fit_in_closed_form(
    public: PublicExchange,
    client: Client,
    modality: str,
    layer: nn.Linear,
    targets: Mapping[str, Tensor],
    penalty: float,
) -> None:
    """Set the layer that ends a tower to the ridge regression from its inputs to the targets of its modality.

    In evaluation mode. Targets are [n, d] by output; rows of zeros do not count.
    """
    own = {name: rows for name, rows in targets.items() if modality_of(name) == modality}
    samples = [client.public.parts[name] if name in client.public.parts else public.drawn(client) for name in own]
    inputs = [layer_inputs(client, layer, part, modality) for part in samples]
    features, target = torch.cat(inputs), torch.cat(list(own.values()))
    valid = target.any(1)
    if bool(valid.any()):
        weight, intercept = ridge_regression(features[valid], target[valid], penalty)
        layer.weight.copy_(weight.T)
        layer.bias.copy_(intercept)


def layer_inputs(client: Client, layer: nn.Linear, samples: Samples, modality: str) -> Float[Tensor, "n f"]:
    """Inputs of a layer of the client's model, a row per sample."""
    batches = list[Tensor]()
    handle = layer.register_forward_pre_hook(lambda _, inputs: batches.append(inputs[0].float()))
    try:
        # each distinct row is encoded once, but counts as often as it occurs
        _, inverse_index = client.represent_distinct(samples, modality)
    finally:
        handle.remove()
    return torch.cat(batches)[inverse_index]


def ridge_regression(
    inputs: Float[Tensor, "n f"], target: Float[Tensor, "n d"], penalty: float
) -> tuple[Float[Tensor, "f d"], Float[Tensor, " d"]]:
    """W and b that minimise ||X W + b - Z||^2 + penalty n v ||W||^2, v being the mean variance of the inputs.

    The intercept is free. As the penalty is relative to the inputs' own scale, one value suits all backbones.
    """
    x, z = inputs.double(), target.double()
    x_mean, z_mean = x.mean(0), z.mean(0)
    x = x - x_mean
    gram = x.T @ x
    # never zero, or inputs without variance would leave nothing to solve for
    scale = (gram.trace() / len(gram)).clamp_min(torch.finfo(torch.float32).tiny)
    gram.diagonal().add_(penalty * scale)
    weight = torch.linalg.solve(gram, x.T @ (z - z_mean))
    return weight.to(target.dtype), (z_mean - x_mean @ weight).to(target.dtype)
