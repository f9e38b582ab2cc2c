"""Digests: a client fits its model's outputs on public samples to outputs that it received."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyfed.algorithms.algorithm import Client
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.data.samples import Batch, Samples
from polyfed.losses.distillation import DISTILLATIONS, Distillation
from polyfed.models.model import Model


def fit_by_gradient(
    method: PublicExchange, client: Client, batches: Iterator[Batch], goals: Mapping[str, Tensor], loss: Distillation
) -> None:
    """One optimiser step a batch on the sum over outputs of the distance to the goals, output -> [n, w].

    Rows of zeros are no goal.
    """
    valid = {name: values.any(1) for name, values in goals.items()}
    trainer, distance = client.trainer(), DISTILLATIONS[loss]
    for batch in batches:
        own = method.output_kind.outputs(client, batch, list(goals))
        parts = [distance(own[name], goal[batch.index], valid[name][batch.index]) for name, goal in goals.items()]
        trainer.step(torch.stack(parts).sum())


def only_layer(model: Model, modality: str) -> nn.Linear | None:
    """The linear layer that is all that a tower trains, if it is: then the tower is linear in its weights."""
    tower = model.tower(modality)
    trained = {id(value) for value in tower.parameters() if value.requires_grad}
    layers = [layer for layer in tower.modules() if isinstance(layer, nn.Linear)]
    return next((layer for layer in layers if trained == {id(value) for value in layer.parameters()}), None)


@torch.no_grad()
def fit_in_closed_form(
    client: Client, samples: Samples, modality: str, layer: nn.Linear, goal: Float[Tensor, "n d"], penalty: float
) -> None:
    """Set the layer that ends a tower to the ridge regression from its inputs to the goal, in evaluation mode."""
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0].float()))
    try:
        # each distinct row is encoded once, but counts as often as it stands among the samples
        _, places = client.represent_distinct(samples, modality)
    finally:
        handle.remove()
    weight, intercept = ridge(torch.cat(inputs)[places], goal, penalty)
    layer.weight.copy_(weight.T)
    if layer.bias is not None:
        layer.bias.copy_(intercept)


def ridge(
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
