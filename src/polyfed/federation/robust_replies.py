"""A robust rule between a cohort's replies and the method that combines them.

Every reply of a type of clients leaves with what the rule says stands for that type. So any mean that a method makes of
them is, within a type, the rule's result, whatever crosses and however the method weighs; between types it is the
method's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.aggregation.mean import accumulator
from polyfed.core.errors import ConfigError, ExchangeError
from polyfed.federation.client import ClientInfo
from polyfed.federation.filters import Ask, Reply
from polyfed.federation.types import by_architecture
from polyfed.privacy.rules import RobustRule
from polyfed.wire.payload import Payload, TensorBundle


def require_enough(rule: RobustRule, clients: Sequence[ClientInfo], when: str) -> None:
    """Check that a rule can stand up to the false clients that it tolerates, in each type of those asked.

    Raises:
        ConfigError: a type has too few clients.
    """
    for members in by_architecture(clients).values():
        false = rule.false_clients(len(members))
        if len(members) < rule.required(false):
            raise ConfigError(f"{when}: {_too_few(rule, false, members, len(members))}")


def _too_few(rule: RobustRule, false: int, members: Sequence[ClientInfo], asked: int) -> str:
    groups, names = "+".join(sorted({client.group for client in members})), ", ".join(client.id for client in members)
    return (
        f"aggregation.robust '{rule.component_name()}' that tolerates {false} of {asked} clients of a type needs "
        f"{rule.required(false)} replies of it, and type '{groups}' has {len(members)} ({names}); ask more clients, "
        "lower aggregation.robust.tolerated, or choose another rule"
    )


@dataclass(frozen=True)
class RobustReplies:
    """Puts what stands for a type in place of the tensors of its replies, which wait for each other.

    Attributes:
        rule: by which.
    """

    rule: RobustRule

    def __call__(self, replies: Iterator[Reply], ask: Ask) -> Iterator[Reply]:
        """The same senders, type by type; what holds no tensors passes as it is.

        Raises:
            ExchangeError: fewer clients of a type replied than the rule needs.
        """
        if ask.schema.kind == "fresh":
            yield from replies
            return
        waiting: dict[str, list[Reply]] = {}
        positions = {client.id: k for k, client in enumerate(ask.clients)}
        last = {client.architecture: k for k, client in enumerate(ask.clients)}
        for reply in replies:
            if reply.payload.bundles:
                waiting.setdefault(reply.sender.architecture, []).append(reply)
            else:
                yield reply
            # replies come in client order: of a type whose last client is behind us, no more will come
            for architecture in [name for name in waiting if last[name] <= positions[reply.sender.id]]:
                yield from self._of_type(waiting.pop(architecture), ask)
        for sent in waiting.values():
            yield from self._of_type(sent, ask)

    def _of_type(self, sent: Sequence[Reply], ask: Ask) -> Iterator[Reply]:
        members = [reply.sender for reply in sent]
        asked = sum(client.architecture == members[0].architecture for client in ask.clients)
        false = self.rule.false_clients(asked)
        if len(sent) < self.rule.required(false):
            raise ExchangeError(f"'{ask.step}': {_too_few(self.rule, false, members, asked)}")
        fields = {name: self._bundles(name, sent, false, ask.step) for name in sent[0].payload.bundles}
        for k, reply in enumerate(sent):
            own = {name: bundles[k] for name, bundles in fields.items()}
            reply.payload = Payload({**reply.payload.fields, **own})
            yield reply

    def _bundles(self, name: str, sent: Sequence[Reply], false: int, step: str) -> list[TensorBundle]:
        """What each sender's bundle becomes."""
        bundles = [reply.payload.bundles[name] for reply in sent]
        for reply, bundle in zip(sent, bundles, strict=True):
            if bundle.specs != bundles[0].specs:
                raise ExchangeError(
                    f"'{step}': {name} of {reply.sender.id} have other tensors than those of {sent[0].sender.id}, "
                    "which is of its type; aggregation.robust compares tensor by tensor"
                )
        tensors = _combined(self.rule, bundles, false)
        return [type(bundle)(tensors=tensors, **bundle.attributes()) for bundle in bundles]


def _combined(rule: RobustRule, bundles: Sequence[TensorBundle], false: int) -> dict[str, Tensor]:
    """What stands for bundles of equal tensors; counters, which are whole numbers, by their median."""
    first = bundles[0]
    floating = [name for name, value in first.items() if value.is_floating_point()]
    values = [[bundle[name].to(accumulator(first[name].dtype)) for name in floating] for bundle in bundles]
    made = dict(zip(floating, rule.combined(values, false) if floating else (), strict=True))
    result = {}
    for name, value in first.items():
        # the lower of two in the middle: a whole number that somebody counted
        if name not in made:
            made[name] = torch.stack([bundle[name].long() for bundle in bundles]).median(0).values
        result[name] = made[name].to(value.dtype)
    return result
