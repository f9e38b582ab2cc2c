"""Gated linear layers: W + g W_out, with weights of another modality behind a gate that starts shut (FedCola, 4.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from polyfed.models.slots import BLOCK_ROLES


class GatedWeight(nn.Module):
    """The effective weight W + g W_out of a linear layer (FedCola, section 4.2).

    With the gate g at zero, where it starts, it is W bit for bit, and W_out gets no gradient.

    Args:
        out: W_out, of the shape of W; it is copied.
        trainable: whether W_out is trained; if not, it has neither gradient nor optimiser state.

    >>> gated_weight = GatedWeight(out=torch.ones(1, 2))
    >>> gated_weight(torch.zeros(1, 2)).tolist(), gated_weight.gate.data.fill_(0.5).tolist()
    ([[0.0, 0.0]], [0.5])
    >>> gated_weight(torch.zeros(1, 2)).tolist()
    [[0.5, 0.5]]
    """

    def __init__(self, out: Float[Tensor, "o i"], *, trainable: bool = True) -> None:
        super().__init__()
        self.out = nn.Parameter(out.clone(), requires_grad=trainable)
        # at zero, training starts from the model that was sent
        self.gate = nn.Parameter(torch.zeros(1, device=out.device, dtype=out.dtype))

    def forward(self, weight: Float[Tensor, "o i"]) -> Float[Tensor, "o i"]:
        return torch.addcmul(weight, self.gate, self.out)


def linears(module: nn.Module, roles: frozenset[str]) -> dict[str, nn.Linear]:
    """The linear layers, by name, within blocks' parts of the given roles (attention, mlp).

    >>> from polyfed.models.blocks import TransformerBlock
    >>> list(linears(TransformerBlock(width=8, heads=2, hidden=16), frozenset(["mlp"])))
    ['mlp.fc1', 'mlp.fc2']
    """
    return {
        f"{name}.{inner}" if name and inner else name or inner: layer
        for name, part in module.named_modules()
        if getattr(part, "role", None) in roles
        for inner, layer in part.named_modules()
        if isinstance(layer, nn.Linear)
    }


@contextlib.contextmanager
def gated(module: nn.Module, outs: Mapping[str, Tensor], *, trainable: bool = True) -> Iterator[dict[str, GatedWeight]]:
    """Give linear layers of a module gates for the length of a block; afterwards W + g W_out is their plain weight.

    After an error the layers are plain again, with whatever weights.

    Args:
        module: whose layers are changed, in place.
        outs: name of a linear layer -> W_out, of the shape of its weight.
        trainable: whether W_out is trained.

    Yields:
        The gates by the name of their layer.

    >>> layer = nn.Sequential(nn.Linear(2, 1, bias=False))
    >>> with gated(layer, {"0": torch.ones(1, 2)}) as gates:
    ...     _ = layer[0].parametrizations.weight.original.data.zero_(), gates["0"].gate.data.fill_(0.5)
    >>> layer[0].weight.tolist()
    [[0.5, 0.5]]
    """
    gates: dict[str, GatedWeight] = {}
    orders: dict[str, list[str]] = {}
    try:
        for name, out in outs.items():
            layer = module.get_submodule(name)
            orders[name] = list(layer._parameters)
            gates[name] = GatedWeight(out.to(layer.weight), trainable=trainable)  # type: ignore[arg-type]
            parametrize.register_parametrization(layer, "weight", gates[name])
        yield gates
    finally:
        for name in gates:
            layer = module.get_submodule(name)
            if parametrize.is_parametrized(layer):
                # leaves W + g W_out as the plain weight: the compression trick of section 4.2
                parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
                # in the former order, on which sums over all parameters depend in their last bits
                layer._parameters = {key: layer._parameters[key] for key in orders[name]}


def undecayed(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that weight decay must spare: gates, and what is behind them.

    W_out gets no gradient while its gate is shut; decay would shrink it all the same.
    """
    return [value for part in model.modules() if isinstance(part, GatedWeight) for value in part.parameters()]


ROLES: Mapping[str, frozenset[str]] = {
    "blocks": frozenset(BLOCK_ROLES),
    "attention": frozenset(["attention"]),
    "mlp": frozenset(["mlp"]),
}
"""Parts of blocks that take weights of another modality -> their roles."""
