"""Attacks on what clients of a simulation send: each falsifies its own, or several agree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyfed.federation.attack import Attack
from polyfed.wire.payload import Payload, TensorBundle, Weights

_VARIANCE = "running_var"  # torch's own name; a negative one would be refused for that alone


class FalseUpdate(Attack):
    """Each attacker trains as it should, and falsifies what it sends, alone."""

    def falsified(self, payload: Payload, sent: Payload, stream: torch.Generator) -> Payload:
        """A reply as it leaves, before it is encoded.

        Of weights the update is falsified, which is what they changed from those sent under the same name, or from 0;
        of rows and prototypes, the rows. Whole numbers and scalars stay.
        """
        fields = dict(payload.fields)
        for name, bundle in payload.bundles.items():
            start = _start(sent, name, bundle)
            tensors = {key: self._of(bundle, key, start.get(key), stream) for key in bundle}
            fields[name] = remade(bundle, tensors)
        return Payload(fields)

    def _of(self, bundle: TensorBundle, key: str, start: Tensor | None, stream: torch.Generator) -> Tensor:
        value = bundle[key]
        if not value.is_floating_point() or not value.numel():
            return value
        centre = torch.zeros_like(value) if start is None else start.to(value)
        change = value - centre
        # weights are one vector each, rows one a sample or class
        rows = change.reshape(1, -1) if isinstance(bundle, Weights) else change.reshape(-1, change.shape[-1])
        return centre + self.false(rows, stream).reshape(value.shape)

    @abstractmethod
    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        """What stands for rows [n, d]: a tensor's update as one row, or representations, logits or prototypes."""


class Conspiracy(Attack):
    """Attackers of a type agree on what they send, knowing what each has learnt, or what all clients send."""

    def agreed(self, honest: Mapping[str, Payload], attackers: Sequence[str]) -> dict[str, Payload]:
        """What the attackers of one type send in a round.

        Args:
            honest: client -> what training made of it, of all clients of the type that replied, in client order.
            attackers: those of them who attack, at least one.
        """
        return {name: self._reply(honest, attackers, name) for name in attackers}

    def _reply(self, honest: Mapping[str, Payload], attackers: Sequence[str], name: str) -> Payload:
        fields = dict(honest[name].fields)
        for field, bundle in honest[name].bundles.items():
            everybody = [payload.bundles[field] for payload in honest.values()]
            fellows = [honest[fellow].bundles[field] for fellow in attackers]
            false = {
                key: self.common(_alike(everybody, key, value), _alike(fellows, key, value))
                for key, value in bundle.items()
                if value.is_floating_point() and value.numel()
            }
            fields[field] = remade(bundle, {**bundle, **false})
        return Payload(fields)

    @abstractmethod
    def common(self, everybody: Sequence[Tensor], attackers: Sequence[Tensor]) -> Tensor:
        """What attackers send in place of a tensor that all clients of the type have, and the attackers among them."""


def _alike(bundles: Sequence[TensorBundle], key: str, value: Tensor) -> list[Tensor]:
    """The tensors of that name and shape, which among prototypes not all have."""
    return [bundle[key] for bundle in bundles if key in bundle and bundle[key].shape == value.shape]


def remade(bundle: TensorBundle, tensors: Mapping[str, Tensor]) -> TensorBundle:
    """The bundle with other tensors; variances stay positive, as a negative one would be refused for that alone."""
    sound = {name: value.abs() if name.endswith(_VARIANCE) else value for name, value in tensors.items()}
    return type(bundle)(tensors=sound, **bundle.attributes())


def _start(sent: Payload, name: str, bundle: TensorBundle) -> Mapping[str, Tensor]:
    start = sent.bundles.get(name)
    return start if isinstance(bundle, Weights) and isinstance(start, Weights) else {}
