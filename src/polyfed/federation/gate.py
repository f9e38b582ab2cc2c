"""The gate that replies pass: those whose updates are far longer than their cohort's are shortened or refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import safetensors.torch
import torch
from torch import Tensor

from polyfed.federation.bounds import ENOUGH, SIZE, WHOLE, Bounds, Lengths, excess, lengths, shortened, times, usual
from polyfed.federation.client import ClientInfo
from polyfed.federation.payload import Artefact, Payload, Weights, settled
from polyfed.federation.wire import tensor_bytes

Origin = Callable[[ClientInfo, str], Mapping[str, Tensor]]

Usual = dict[str, dict[str, float]]
"""Step, field and architecture -> what updates were last like there; see ``bounds.usual``."""


@dataclass(frozen=True)
class Arrival:
    """A reply at the gate.

    Attributes:
        client: who sent it.
        payload: what it sent.
        moved: field of weights -> lengths of its update.
        refused: why it does not pass, or None.
        shortened: what was scaled down, or None.
    """

    client: ClientInfo
    payload: Payload
    moved: Mapping[str, Lengths]
    refused: str | None = None
    shortened: str | None = None


class Gate:
    """Lets the replies to one ask through, in the order in which they come.

    A reply whose updates are of a length that was usual the last time passes at once. The first that is not waits, and
    all behind it, until everybody has answered; then the medians of this ask count as well. So replies wait when a step
    is asked for the first time, or if something is unusual, and what counts never depends on when a reply arrives.
    """

    def __init__(
        self,
        bounds: Bounds,
        step: str,
        asked: Sequence[ClientInfo],
        known: Usual,
        origin: Origin,
        changes: Collection[str] = (),
        folder: Path | None = None,
    ) -> None:
        """Open the gate.

        Args:
            bounds: that hold.
            step: that was asked for.
            asked: the cohort.
            known: what was usual so far; brought up to date when all have passed.
            origin: client and field of its reply -> the weights that its update starts from.
            changes: fields of replies that hold no new weights but changes of what their origin is.
            folder: for replies that wait in files.
        """
        self._bounds, self._step, self._known = bounds, step, known
        self._origin, self._changes = origin, changes
        self._room = WaitingRoom(bounds.waiting, folder)
        self._seen: dict[str, list[Lengths]] = {}
        self._entries: dict[str, dict[str, int]] = {}
        self._alike = {
            client.architecture: sum(other.architecture == client.architecture for other in asked) for client in asked
        }

    def arrival(self, client: ClientInfo, payload: Payload) -> Arrival:
        """A reply and how far it moved what was sent.

        Raises:
            PayloadError: a tensor has another shape or type of numbers than what was sent, or a counter fell.
        """
        weights = {name: item for name, item in payload.artefacts.items() if isinstance(item, Weights)}
        return Arrival(
            client, payload, {name: lengths(item, self.start(client, name)) for name, item in weights.items()}
        )

    def start(self, client: ClientInfo, name: str) -> Mapping[str, Tensor]:
        """What the weights in a field of a client's reply started from; nothing for changes."""
        return {} if name in self._changes else self._origin(client, name)

    def passed(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """The same replies in the same order, judged."""
        for arrival in arrivals:
            self._note(arrival)
            if self._room.is_empty and (self._is_incomparable(arrival) or self._is_usual(arrival)):
                yield arrival
            else:
                self._room.add(arrival)
        now = {key: usual(seen, self._entries[key]) for key, seen in self._seen.items()}
        for arrival in self._room.leaving():
            yield self._judged(arrival, now)
        self._known.update({key: found for key, found in now.items() if found})

    def _key(self, client: ClientInfo, name: str) -> str:
        return f"{self._step}/{name}/{client.architecture}"

    def _note(self, arrival: Arrival) -> None:
        for name, moved in arrival.moved.items():
            key = self._key(arrival.client, name)
            self._seen.setdefault(key, []).append(moved)
            floating = {k: v.numel() for k, v in arrival.payload.artefacts[name].items() if v.is_floating_point()}
            self._entries.setdefault(key, floating)

    def _is_incomparable(self, arrival: Arrival) -> bool:
        return not self._bounds.bind or not arrival.moved or self._alike[arrival.client.architecture] < ENOUGH

    def _is_usual(self, arrival: Arrival) -> bool:
        known = {name: self._known.get(self._key(arrival.client, name), {}) for name in arrival.moved}
        return all(found and self._reasons(arrival, name, found) == (None, None) for name, found in known.items())

    def _judged(self, arrival: Arrival, now: Mapping[str, Mapping[str, float]]) -> Arrival:
        fields, notes = dict(arrival.payload.fields), []
        for name, moved in arrival.moved.items():
            known = self._expected(arrival.client, name, now)
            refused, too_long = self._reasons(arrival, name, known)
            if refused is not None:
                return replace(arrival, refused=refused)
            if too_long is not None and self._bounds.update is not None:
                start, item = self.start(arrival.client, name), arrival.payload.artefacts[name]
                fields[name] = Weights(shortened(item, start, moved, known, self._bounds.update))
                notes.append(too_long)
        return replace(arrival, payload=Payload(fields), shortened="; ".join(notes)) if notes else arrival

    def _reasons(self, arrival: Arrival, name: str, known: Mapping[str, float]) -> tuple[str | None, str | None]:
        """Why the weights in a field are to be refused, and why to be shortened."""
        moved, bounds = arrival.moved[name], self._bounds
        if name not in self._changes:
            for key, bound, what in ((WHOLE, bounds.refuse, "the update is"), (SIZE, bounds.size, "they are")):
                found = times(moved, known, key)
                if bound is not None and found > bound:
                    setting = "refuse" if key == WHOLE else "size"
                    return self._reason(f"{name}: {what}", found, setting, bound), None
        found, worst = excess(moved, known)
        if bounds.update is None or found <= bounds.update:
            return None, None
        where = "" if worst == WHOLE else f" in '{worst}'"
        return None, self._reason(f"{name}: the update{where} is", found, "update", bounds.update)

    def _expected(self, client: ClientInfo, name: str, now: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
        """What is usual by this ask or the last; a change may also be as long as what it changes.

        Changes of a control variate, for one, are long when a client takes part for the first time, and short after.
        """
        key = self._key(client, name)
        known = [now[key], self._known.get(key, {})]
        if name in self._changes and now[key]:
            known.append(lengths(self._origin(client, name), {}))
        return {tensor: max(one.get(tensor, 0.0) for one in known) for tensor in now[key]}

    @staticmethod
    def _reason(what: str, found: float, setting: str, bound: float) -> str:
        return f"{what} {found:.3g} times as long as usual in its cohort, run.bounds.{setting} is {bound:g}"


@dataclass
class WaitingRoom:
    """Replies in order: in memory up to a number of bytes, the others in files without a name.

    Attributes:
        limit: bytes of tensors in memory.
        folder: where the files are; None: where temporary files are.
    """

    limit: int
    folder: Path | None = None
    _held: list[Arrival | _Filed] = field(default_factory=list)
    _bytes: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._held

    def add(self, arrival: Arrival) -> None:
        """Let a reply wait."""
        size = sum(tensor_bytes(item) for item in arrival.payload.artefacts.values())
        if self._bytes + size <= self.limit:
            self._bytes += size
            self._held.append(arrival)
        else:
            self._held.append(_Filed.of(arrival, self.folder))

    def leaving(self) -> Iterator[Arrival]:
        """All replies in order; each is let go of when the next is asked for."""
        self._held.reverse()
        while self._held:
            item = self._held.pop()
            yield item.read() if isinstance(item, _Filed) else item


@dataclass(frozen=True)
class _Filed:
    """A reply whose tensors are in a file, which is gone when it is closed, even by a kill."""

    arrival: Arrival
    file: IO[bytes]
    devices: Mapping[str, torch.device]

    @classmethod
    def of(cls, arrival: Arrival, folder: Path | None) -> _Filed:
        artefacts = arrival.payload.artefacts
        tensors = {f"{name}/{key}": value for name, item in artefacts.items() for key, value in item.items()}
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by ``read``
        file.write(safetensors.torch.save({key: value.cpu().contiguous().clone() for key, value in tensors.items()}))
        empty = {name: _with_tensors(item, {}) for name, item in artefacts.items()}
        outline = replace(arrival, payload=Payload({**arrival.payload.fields, **empty}))
        return cls(outline, file, {key: value.device for key, value in tensors.items()})

    def read(self) -> Arrival:
        with self.file:
            self.file.seek(0)
            loaded = safetensors.torch.load(self.file.read())
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in self.arrival.payload.artefacts}
        for path, device in self.devices.items():
            name, _, key = path.partition("/")
            tensors[name][key] = settled(loaded[path].to(device))
        full = {name: _with_tensors(item, tensors[name]) for name, item in self.arrival.payload.artefacts.items()}
        return replace(self.arrival, payload=Payload({**self.arrival.payload.fields, **full}))


def _with_tensors(item: Artefact, tensors: Mapping[str, Tensor]) -> Artefact:
    return type(item)(tensors=tensors, **item.attributes())
