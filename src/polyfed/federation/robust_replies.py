"""A robust rule between a cohort's replies and the method that combines them.

Every reply of a type of clients leaves with what the rule says stands for that type. So any mean that a method makes of
them is, within a type, the rule's result, whatever crosses and however the method weighs; between types it is the
method's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyfed.aggregation.mean import accumulator
from polyfed.aggregation.prototypes import ClassMeans, by_space, prototype_tensors
from polyfed.aggregation.robust_rule import BufferingRule, RobustRule
from polyfed.aggregation.rules import Clip
from polyfed.core.errors import ConfigError, ExchangeError
from polyfed.federation.client import ClientInfo
from polyfed.wire.payload import Payload, Prototypes, TensorBundle, Weights

if TYPE_CHECKING:
    from polyfed.federation.gate import Medians

Sent = tuple[ClientInfo, Payload]
"""Who sent what."""
Start = Callable[[ClientInfo, str], Mapping[str, Tensor]]
"""Client and field of its reply -> the weights that its update starts from."""


def require_enough(rule: RobustRule, clients: Sequence[ClientInfo], when: str) -> None:
    """Check that a rule can stand up to the false clients that it tolerates, in each type of those asked.

    Raises:
        ConfigError: a type has too few clients.
    """
    for members in _by_type(clients).values():
        false = rule.false_clients(len(members))
        if len(members) < rule.required(false):
            raise ConfigError(f"{when}: {_too_few(rule, false, members, len(members))}")


def _by_type(clients: Sequence[ClientInfo]) -> dict[str, list[ClientInfo]]:
    types: dict[str, list[ClientInfo]] = {}
    for client in clients:
        types.setdefault(client.architecture, []).append(client)
    return types


def _too_few(rule: RobustRule, false: int, members: Sequence[ClientInfo], asked: int) -> str:
    groups, names = "+".join(sorted({client.group for client in members})), ", ".join(client.id for client in members)
    return (
        f"aggregation.robust '{rule.component_name()}' that tolerates {false} of {asked} clients of a type needs "
        f"{rule.required(false)} replies of it, and type '{groups}' has {len(members)} ({names}); ask more clients, "
        "lower aggregation.robust.tolerated, or choose another rule"
    )


@dataclass
class RobustReplies:
    """The replies to one ask, robust.

    Attributes:
        rule: that holds.
        step: that was asked for.
        asked: the clients, in client order, in which replies come.
        known: norms of the last ask of each step; brought up to date.
        start: what updates start from.
    """

    rule: RobustRule
    step: str
    asked: Sequence[ClientInfo]
    known: Medians
    start: Start
    _seen: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def combined(self, replies: Iterable[Sent]) -> Iterator[Sent]:
        """The same senders, type by type, with robust payloads; what holds no tensors passes as it is.

        Raises:
            ExchangeError: fewer clients of a type replied than the rule needs.
        """
        waiting: dict[str, list[Sent]] = {}
        position = {client.id: k for k, client in enumerate(self.asked)}
        last = {client.architecture: k for k, client in enumerate(self.asked)}
        for client, payload in replies:
            if (at_once := self._at_once(client, payload)) is not None:
                yield client, at_once
            else:
                waiting.setdefault(client.architecture, []).append((client, payload))
            # replies come in client order: of a type whose last client is behind us, no more will
            for kind in [kind for kind in waiting if last[kind] <= position[client.id]]:
                yield from self._of_type(waiting.pop(kind))
        for sent in waiting.values():
            yield from self._of_type(sent)
        self._remember()

    def _at_once(self, client: ClientInfo, payload: Payload) -> Payload | None:
        if not payload.bundles:
            return payload
        if isinstance(self.rule, Clip) and all(self._key(client, name) in self.known for name in payload.bundles):
            return self._clipped(self.rule, client, payload, self.known)
        return None

    def _of_type(self, sent: Sequence[Sent]) -> Iterator[Sent]:
        false = self._require(sent)
        if isinstance(self.rule, Clip):
            for client, payload in sent:
                self._note(client, payload)
            now = {key: _medians(norms) for key, norms in self._seen.items()}
            for client, payload in sent:
                yield client, self._clipped(self.rule, client, payload, now, noted=True)
            return
        assert isinstance(self.rule, BufferingRule)
        fields = {name: self._bundles(name, sent, false) for name in sent[0][1].bundles}
        for k, (client, payload) in enumerate(sent):
            yield client, Payload({**payload.fields, **{name: bundles[k] for name, bundles in fields.items()}})

    def _require(self, sent: Sequence[Sent]) -> int:
        members = [client for client, _ in sent]
        asked = [client for client in self.asked if client.architecture == members[0].architecture]
        false = self.rule.false_clients(len(asked))
        if len(sent) < self.rule.required(false):
            raise ExchangeError(f"'{self.step}': {_too_few(self.rule, false, members, len(asked))}")
        return false

    # ---- buffering rules

    def _bundles(self, name: str, sent: Sequence[Sent], false: int) -> list[TensorBundle]:
        """What each sender's bundle becomes."""
        assert isinstance(self.rule, BufferingRule)
        bundles = [payload.bundles[name] for _, payload in sent]
        if isinstance(bundles[0], Prototypes):
            return _prototypes(self.rule, bundles, false)
        for (client, _), bundle in zip(sent, bundles, strict=True):
            if bundle.specs != bundles[0].specs:
                raise ExchangeError(
                    f"'{self.step}': {name} of {client.id} have other tensors than those of {sent[0][0].id}, "
                    "which is of its type; aggregation.robust compares tensor by tensor"
                )
        tensors = _combined(self.rule, bundles, false)
        return [type(bundle)(tensors=tensors, **bundle.attributes()) for bundle in bundles]

    # ---- clipping

    def _remember(self) -> None:
        """Keep the medians of those types of which so many replied that these can bound the next."""
        for key, norms in self._seen.items():
            if min(map(len, norms.values()), default=0) >= self.rule.required(1):
                self.known[key] = _medians(norms)

    def _key(self, client: ClientInfo, name: str) -> str:
        return f"clip {self.step}/{name}/{client.architecture}"

    def _note(self, client: ClientInfo, payload: Payload) -> None:
        for name, bundle in payload.bundles.items():
            seen = self._seen.setdefault(self._key(client, name), {})
            for tensor, norms in self._norms(client, name, bundle).items():
                seen.setdefault(tensor, []).append(float(norms.median()) if norms.numel() else 0.0)

    def _norms(self, client: ClientInfo, name: str, bundle: TensorBundle) -> dict[str, Tensor]:
        changes = _changes(bundle, self.start(client, name))
        dim = None if isinstance(bundle, Weights) else -1
        return {key: torch.linalg.vector_norm(value, dim=dim) for key, value in changes.items()}

    def _clipped(
        self,
        rule: Clip,
        client: ClientInfo,
        payload: Payload,
        medians: Mapping[str, Mapping[str, float]],
        *,
        noted: bool = False,
    ) -> Payload:
        if not noted:
            self._note(client, payload)
        fields = dict(payload.fields)
        for name, bundle in payload.bundles.items():
            limits, tensors = medians[self._key(client, name)], dict(bundle)
            start = self.start(client, name) if isinstance(bundle, Weights) else {}
            for key, norms in self._norms(client, name, bundle).items():
                scales = (rule.times * limits.get(key, float("inf")) / norms).clamp_max(1).nan_to_num(1.0)
                if bool((scales < 1).any()):
                    tensors[key] = _scaled(bundle[key], start.get(key), scales)
            fields[name] = type(bundle)(tensors=tensors, **bundle.attributes())
        return Payload(fields | self._counting(rule, client, payload))

    def _counting(self, rule: Clip, client: ClientInfo, payload: Payload) -> dict[str, int]:
        """The ``num_examples`` that a reply counts for."""
        claimed = payload.scalars.get("num_examples")
        if rule.samples == "claimed" or not isinstance(claimed, int):
            return {}
        peers = [other.samples for other in self.asked if other.architecture == client.architecture]
        if rule.samples == "capped":
            return {"num_examples": min(claimed, int(median(peers)))}
        return {"num_examples": max(1, round(sum(peers) / len(peers)))}


def _medians(norms: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in norms.items()}


def _changes(bundle: TensorBundle, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating tensors of a bundle; weights less what they started from, in fp32 at least."""
    floating = {name: value.to(accumulator(value.dtype)) for name, value in bundle.items() if _counts(value)}
    if not isinstance(bundle, Weights):
        return floating
    return {name: value - start[name].to(value) if name in start else value for name, value in floating.items()}


def _counts(value: Tensor) -> bool:
    return value.is_floating_point() and value.ndim > 0


def _scaled(value: Tensor, start: Tensor | None, scales: Tensor) -> Tensor:
    """Nearer to the start, or to 0, tensor by tensor or row by row."""
    exact = value.to(accumulator(value.dtype))
    centre = torch.zeros_like(exact) if start is None else start.to(exact)
    factors = scales if not scales.ndim else scales[..., None]
    return torch.where(factors < 1, centre + factors * (exact - centre), exact).to(value.dtype)


def _combined(rule: BufferingRule, bundles: Sequence[TensorBundle], false: int) -> dict[str, Tensor]:
    """What stands for bundles of equal tensors; counters, which are whole numbers, by their median."""
    first = bundles[0]
    floating = [name for name, value in first.items() if value.is_floating_point()]
    values = [[bundle[name].to(accumulator(first[name].dtype)) for name in floating] for bundle in bundles]
    made = dict(zip(floating, rule.combined(values, false) if floating else (), strict=True))
    result = {}
    for name, value in first.items():
        # the lower of two in the middle: a whole number that somebody counted
        whole = torch.stack([bundle[name].long() for bundle in bundles]).median(0).values if name not in made else None
        result[name] = (made[name] if whole is None else whole).to(value.dtype)
    return result


def _prototypes(rule: BufferingRule, bundles: Sequence[TensorBundle], false: int) -> list[TensorBundle]:
    """Class by class: a class that too few have for the rule is left out of the round."""
    spaces = [by_space(bundle, ClassMeans) for bundle in bundles]
    names = sorted({name for own in spaces for name in own})
    robust = {name: _class_rows(rule, [_by_class(own[name]) for own in spaces if name in own], false) for name in names}
    if names and not any(robust.values()):
        raise ExchangeError(
            f"aggregation.robust '{rule.component_name()}' needs {rule.required(false)} clients of a type with a "
            "class, and no class has so many; lower aggregation.robust.tolerated, or leave the rule out"
        )
    return [Prototypes(_robust_tensors(own, robust)) for own in spaces]


def _robust_tensors(spaces: Mapping[str, ClassMeans], robust: Mapping[str, Mapping[int, Tensor]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, own in spaces.items():
        kept = [label for label in _by_class(own) if label in robust[name]]
        if kept:
            tensors |= prototype_tensors(name, _table(own, kept, robust[name]))
    return tensors


def _by_class(own: ClassMeans) -> dict[int, Tensor]:
    return dict(zip(own.present.nonzero().flatten().tolist(), own.means, strict=True))


def _class_rows(rule: BufferingRule, rows: Sequence[Mapping[int, Tensor]], false: int) -> dict[int, Tensor]:
    robust = {}
    for label in sorted({label for own in rows for label in own}):
        held = [[own[label]] for own in rows if label in own]
        if len(held) >= rule.required(false):
            (robust[label],) = rule.combined(held, false)
    return robust


def _table(own: ClassMeans, kept: Sequence[int], robust: Mapping[int, Tensor]) -> ClassMeans:
    present = torch.zeros_like(own.present)
    present[kept] = True
    counts = own.counts[present[own.present]]
    return ClassMeans(torch.stack([robust[label] for label in kept]), counts, present)
