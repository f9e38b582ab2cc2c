"""Clients of a simulated federation that attack it, so that what protects from them can be measured."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.federation.client import ClientInfo
from polyfed.federation.membership import Member
from polyfed.wire.payload import Payload, TensorBundle, Weights

_VARIANCE = "running_var"  # torch's own name; a negative one would be refused for that alone

Who = tuple[str, ...] | int | float


def _named_or_many(value: Who) -> Who:
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError("clients are names, a number of each type (whole), or a share of each type (up to 1.0)")
    if isinstance(value, int) and value < 1:
        raise ValueError("clients is 0; leave run.attackers out")
    return value


class Attack(Settings):
    """What some clients of a simulation do to a run; a deployment refuses it.

    Attackers do it in every round in which they take part, to what they send in steps of the method; evaluations are
    honest. Subclasses live in ``polyfed.federation.attacks``: they train on false data (``poisoned``),
    falsify what they learnt (``FalseUpdate``), or agree on what they send (``Conspiracy``).
    """

    home: ClassVar[str] = "polyfed.federation.attacks"

    clients: Annotated[Who, AfterValidator(_named_or_many)] = Field(
        default=0.2,
        description="attackers: names, a number of each type, or a share of each (rounded half up), drawn by the seed",
    )
    groups: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="groups that they are drawn from; None: all"
    )

    @property
    def falsifies(self) -> bool:
        return True

    def attackers(self, infos: Sequence[ClientInfo], seed: int) -> tuple[str, ...]:
        """Who attacks, in client order.

        Raises:
            ConfigError: a name or group is unknown, or nobody attacks.
        """
        eligible = self._eligible(infos)
        chosen = set(self._named(eligible) if isinstance(self.clients, tuple) else self._drawn(eligible, seed))
        if not chosen:
            raise ConfigError(f"run.attackers.clients is {self.clients}, which is nobody; raise it, or name clients")
        return tuple(info.id for info in eligible if info.id in chosen)

    def _eligible(self, infos: Sequence[ClientInfo]) -> list[ClientInfo]:
        groups = dict.fromkeys(info.group for info in infos)
        for name in set(self.groups or ()) - set(groups):
            raise ConfigError(f"run.attackers.groups: no clients are called '{name}'; {nearest(name, groups)}")
        return [info for info in infos if self.groups is None or info.group in self.groups]

    def _named(self, eligible: Sequence[ClientInfo]) -> tuple[str, ...]:
        assert isinstance(self.clients, tuple)
        names = [info.id for info in eligible]
        for name in set(self.clients) - set(names):
            raise ConfigError(f"run.attackers.clients: there is no client '{name}'; {nearest(name, names)}")
        return self.clients

    def _drawn(self, eligible: Sequence[ClientInfo], seed: int) -> Iterator[str]:
        for kind in by_type(eligible).values():
            # the order is drawn, not the set: with more attackers, those of before are among them
            order = torch.randperm(len(kind), generator=generator(seed, "attackers", kind[0].architecture)).tolist()
            yield from (kind[k].id for k in order[: self._number(len(kind))])

    def _number(self, clients: int) -> int:
        assert not isinstance(self.clients, tuple)
        share = self.clients * clients + 0.5 if isinstance(self.clients, float) else self.clients
        return min(int(share), clients)

    def require(self, members: Sequence[Member], infos: Sequence[ClientInfo]) -> None:
        """Check that the attackers can attack like this.

        Args:
            members: the attackers.
            infos: all clients.

        Raises:
            ConfigError: one cannot.
        """

    def poisoned(self, samples: Samples, member: Member, split: Split, seed: int) -> Samples:
        return samples


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


def by_type(infos: Iterable[ClientInfo]) -> dict[str, list[ClientInfo]]:
    """Clients by architecture, in client order."""
    types: dict[str, list[ClientInfo]] = {}
    for info in infos:
        types.setdefault(info.architecture, []).append(info)
    return types


def require_fellows(attack: Attack, members: Sequence[Member], infos: Sequence[ClientInfo], needed: str) -> None:
    """Check that attackers have a fellow in their type.

    Raises:
        ConfigError: one has not.
    """
    names = {member.id for member in members}
    for kind in by_type(info for info in infos if info.id in names).values():
        if len(kind) < 2:
            raise ConfigError(
                f"run.attackers '{attack.component_name()}' needs two attackers of a type {needed}, and "
                f"{kind[0].id} is alone in its; raise run.attackers.clients, or choose another attack"
            )


def remade(bundle: TensorBundle, tensors: Mapping[str, Tensor]) -> TensorBundle:
    """The bundle with other tensors; variances stay positive, as a negative one would be refused for that alone."""
    sound = {name: value.abs() if name.endswith(_VARIANCE) else value for name, value in tensors.items()}
    return type(bundle)(tensors=sound, **bundle.attributes())


def _start(sent: Payload, name: str, bundle: TensorBundle) -> Mapping[str, Tensor]:
    start = sent.bundles.get(name)
    return start if isinstance(bundle, Weights) and isinstance(start, Weights) else {}


def attacks_by_client(attacks: Sequence[Attack], infos: Sequence[ClientInfo], seed: int) -> dict[str, Attack]:
    """Attacker -> what it does.

    Raises:
        ConfigError: an attack names unknown clients, or a client is in two.
    """
    found: dict[str, Attack] = {}
    for attack in attacks:
        for name in attack.attackers(infos, seed):
            if name in found:
                raise ConfigError(
                    f"run.attackers: '{name}' is an attacker of '{found[name].component_name()}' and of "
                    f"'{attack.component_name()}'; keep them apart with groups or names"
                )
            found[name] = attack
    return found
