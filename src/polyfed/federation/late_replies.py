"""What a late reply is worth: trained weights of an older model, put upon that of now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyfed.federation.filters import Ask, Received
from polyfed.federation.paces import LatePace
from polyfed.wire.payload import Payload, Weights

# torch's own names, and running means of classes
_STATISTICS = ("running_mean", "running_var", "running_sums", "running_mass")


@dataclass(frozen=True)
class LateReplies:
    """Makes of each reply what its sender would have sent had it started from the model of now; see ``LatePace``.

    So every mean that a method makes of them is the pace's: with shares p_c, the mean of W + s_c (W_c - W_v) is
    W + sum p_c s_c (W_c - W_v); running statistics are mixed with those of now. What a method makes of representations
    is its own, by ``Reply.mixing``.
    """

    pace: LatePace

    def __call__(self, replies: Iterator[Received], ask: Ask) -> Iterator[Received]:
        if ask.schema.kind == "fresh":  # initial weights are of no round
            return replies
        # unlike a loop, map lets go of a reply before it asks for the next
        return map(lambda reply: self._now(reply, ask), replies)

    def _now(self, reply: Received, ask: Ask) -> Received:
        reply = replace(reply, mixing=self.pace.mixing(reply.staleness))
        if reply.mixing == 1.0 and (reply.staleness == 0 or self.pace.onto_now):  # the very bits
            return reply
        fields = dict(reply.payload.fields)
        for name, bundle in reply.payload.bundles.items():
            if isinstance(bundle, Weights):
                fields[name] = self._put(bundle, name, reply, ask)
        return replace(reply, payload=Payload(fields))

    def _put(self, trained: Weights, name: str, reply: Received, ask: Ask) -> Weights:
        if name in ask.changes:
            return Weights({key: value * reply.mixing for key, value in trained.items()})
        now = ask.now(reply.client).bundles[name]
        then: Mapping[str, Tensor] = now if self.pace.onto_now else ask.start(reply.client, name)
        # differences of running statistics do not add up: a variance would become negative
        starts = {key: now[key] if key.endswith(_STATISTICS) else then[key] for key in trained}
        return Weights({key: moved(now[key], starts[key], value, reply.mixing) for key, value in trained.items()})


@torch.no_grad()
def moved(now: Tensor, then: Tensor, trained: Tensor, mixing: float) -> Tensor:
    """now + mixing (trained - then), rounded where it counts whole numbers."""
    if now.is_floating_point():
        return now + (trained.to(now) - then.to(now)) * mixing
    # counters, which in fp32 would lose their last digits
    return now + ((trained.to(now.device) - then.to(now.device)).double() * mixing).round().to(now.dtype)
