"""Engines on which clients send something else than they should, for ``malicious.py`` and ``attackers.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.randomness import generator
from polyfed.engines.engine import Hosting
from polyfed.engines.local import InProcess, LocalEngine
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Engine
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, TensorBundle, Weights

Attack = Literal["random", "flipped", "constant", "scaled", "copied", "nan"]
T = TypeVar("T")


class Attacked(InProcess):
    """The local engine with one client whose every reply is falsified on its way."""

    client: str = Field(default="paired-0", description="who misbehaves")
    attack: Attack = Field(default="random", description="what it sends instead")

    def serve(self, hosting: Hosting, body: Callable[[Engine], T]) -> T:
        """Run ``body``."""
        return body(_Falsifying(LocalEngine(hosting.here()), self.client, self.attack))


@dataclass
class _Falsifying:
    engine: LocalEngine
    client: str
    attack: Attack
    seen: dict[str, Tensor] = field(default_factory=dict)

    def clients(self) -> tuple[ClientInfo, ...]:
        return self.engine.clients()

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        asked = {request.client: request for request in requests}
        for answer in self.engine.exchange(requests, deadline):
            if answer.payload is None or asked[answer.client].step.startswith("assess"):
                yield answer
            elif answer.client == self.client:
                yield replace(answer, payload=self._false(answer.payload, asked[answer.client].round))
            else:
                self._remember(answer.payload)
                yield answer

    def _remember(self, payload: Payload) -> None:
        for name, bundle in payload.bundles.items():
            self.seen |= {f"{name}/{key}": value for key, value in bundle.items()}

    def _false(self, payload: Payload, number: int) -> Payload:
        fields = dict(payload.fields)
        for name, bundle in payload.bundles.items():
            tensors = {key: self._one(f"{name}/{key}", value, number) for key, value in bundle.items()}
            fields[name] = _like(bundle, tensors)
        return Payload(fields)

    def _one(self, name: str, value: Tensor, number: int) -> Tensor:
        if not value.is_floating_point() or not value.ndim:
            return value
        if self.attack == "copied":
            other = self.seen.get(name)
            return value if other is None or other.shape != value.shape else other.clone()
        return FALSE[self.attack](value, generator(0, number, name))


def _like(bundle: TensorBundle, tensors: Mapping[str, Tensor]) -> TensorBundle:
    return type(bundle)(tensors=dict(tensors), **bundle.attributes())


def _norms(value: Tensor) -> Tensor:
    return torch.linalg.vector_norm(value, dim=-1, keepdim=True)


def _random(value: Tensor, stream: torch.Generator) -> Tensor:
    noise = torch.randn(value.shape, generator=stream)
    return noise / _norms(noise) * _norms(value)


FALSE: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "random": _random,
    "flipped": lambda value, stream: -value,
    "constant": lambda value, stream: value[:1].expand_as(value).clone(),
    "scaled": lambda value, stream: 1e3 * value,
    "nan": lambda value, stream: value * float("nan"),
}


# ---- several clients that falsify weights, knowing what they were sent

Falsehood = Literal["none", "silent", "negative", "huge", "noise", "turned", "turned_far"]
CLAIMED = 10**12
LENGTH = 0.9e6  # just within the absolute limit


class Attackers(InProcess):
    """The local engine with clients who falsify their weights, or join with more samples than they have."""

    attackers: tuple[str, ...] = Field(default=(), description="who misbehaves")
    falsehood: Falsehood = Field(default="none", description="what they send in place of what they trained")
    claim: bool = Field(default=False, description="they join with 10^12 samples, and say so in every reply")

    def serve(self, hosting: Hosting, body: Callable[[Engine], T]) -> T:
        """Run ``body``."""
        return body(_Lying(LocalEngine(hosting.here()), self))


@dataclass
class _Lying:
    engine: LocalEngine
    settings: Attackers

    def clients(self) -> tuple[ClientInfo, ...]:
        liars = self.settings.attackers if self.settings.claim else ()
        return tuple(replace(info, samples=CLAIMED) if info.id in liars else info for info in self.engine.clients())

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        asked = {request.client: request for request in requests}
        for answer in self.engine.exchange(requests, deadline):
            lies = answer.client in self.settings.attackers and "weights" in (answer.payload or Payload()).fields
            yield self._false(answer, asked[answer.client]) if lies else answer

    def _false(self, answer: Answer, request: Request) -> Answer:
        assert answer.payload is not None
        if self.settings.falsehood == "silent":
            return Answer(answer.client, error="it says nothing")
        sent, fields = request.payload.bundles["weights"], dict(answer.payload.fields)
        tensors = {
            name: self._one(value, sent[name], generator(0, request.round, answer.client, name))
            for name, value in answer.payload.bundles["weights"].items()
        }
        variances = {name: value.abs() for name, value in tensors.items() if name.endswith("running_var")}
        fields["weights"] = Weights(tensors | variances)  # a negative one would be refused for that
        if self.settings.claim:
            fields["num_examples"] = CLAIMED
        return replace(answer, payload=Payload(fields))

    def _one(self, value: Tensor, sent: Tensor, stream: torch.Generator) -> Tensor:
        if not value.is_floating_point() or self.settings.falsehood == "none":
            return value
        noise = torch.randn(value.shape, generator=stream)
        noise = noise / noise.norm().clamp_min(1e-12)
        made: Mapping[Falsehood, Tensor] = {
            "negative": -3 * value,
            "huge": LENGTH * noise,
            "noise": value.norm() * noise,
            "turned": sent - (value - sent),
            "turned_far": sent - 3.5 * (value - sent),
        }
        return made[self.settings.falsehood]
