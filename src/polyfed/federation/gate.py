"""Norm clipping of a cohort's replies: updates far longer than the median are scaled down, or their senders refused.

Norms are taken of the update of each tensor and of all weights together, relative to the medians of this ask and the
last one: within an architecture, and, where the method averages across architectures, of what all have in common.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot, prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from polyfed.federation.bounds import ENOUGH, Bounds
from polyfed.federation.client import ClientInfo
from polyfed.federation.norms import (
    ALONG,
    SENT,
    SIZE,
    WHOLE,
    Norms,
    Shapes,
    at_rest,
    clipped,
    excess,
    expected_from_all,
    largest_of,
    median_norms,
    medians_across,
    times_median,
    update_norms,
    within_all,
)
from polyfed.wire.framing import tensor_bytes
from polyfed.wire.payload import Payload, TensorBundle, Weights

Origin = Callable[[ClientInfo, str], Mapping[str, Tensor]]

Medians = dict[str, dict[str, float]]
"""Step, field and architecture -> medians of the updates there, as ``median_norms`` gives them.

Step and field, after ``_ACROSS`` -> medians across architectures, as ``medians_across`` gives them."""

_ACROSS = "anywhere "  # a prefix that no step's name has, as names have no blanks


@dataclass(frozen=True)
class Arrival:
    """A reply that has arrived, and what its update was judged to be.

    Attributes:
        client: who sent it.
        payload: what it sent.
        moved: field of weights -> norms of its update.
        shapes: field of weights -> shapes of its floating tensors.
        refused: why it does not pass, or None.
        shortened: why it was scaled down, or None.
    """

    client: ClientInfo
    payload: Payload
    moved: Mapping[str, Norms]
    shapes: Mapping[str, Shapes] = field(default_factory=dict)
    refused: str | None = None
    shortened: str | None = None


class ReplyGate:
    """Lets the replies to one ask through, in the order in which they come.

    A reply whose updates are as long as those of the last ask passes at once. The first that is not waits, and all
    behind it, until everybody has answered; then the medians of this ask count as well. So replies wait when a step is
    asked for the first time, or if something is unusual, and what counts never depends on when a reply arrives.
    """

    def __init__(
        self,
        bounds: Bounds,
        step: str,
        asked: Sequence[ClientInfo],
        known: Medians,
        origin: Origin,
        changes: Collection[str] = (),
        folder: Path | None = None,
        reaches: Mapping[str, float] | None = None,
        across: bool = True,
    ) -> None:
        """Open the gate.

        Args:
            bounds: that hold.
            step: that was asked for.
            asked: the cohort.
            known: medians so far; brought up to date when all have passed.
            origin: client and field of its reply -> the weights that its update starts from.
            changes: fields of replies that hold no new weights but changes of what their origin is.
            folder: for replies that wait in files.
            reaches: client -> how many times longer than the median its updates may be; 1 where it is not among them.
            across: whether updates of different architectures are compared, as what they change is averaged with each
                other; where it is not, an architecture of its own harms nobody else's model.
        """
        self._bounds, self._step, self._known = bounds, step, known
        self._origin, self._changes = origin, changes
        self._room = WaitingRoom(bounds.waiting, folder)
        self._reaches = reaches or {}
        self._seen: dict[str, list[Norms]] = {}
        self._seen_across: dict[str, list[tuple[Norms, Shapes]]] = {}
        self._entries: dict[str, dict[str, int]] = {}
        self._is_small = len(asked) < ENOUGH
        self._across = across

    def arrival(self, client: ClientInfo, payload: Payload) -> Arrival:
        """A reply and how far it moved what was sent.

        Raises:
            PayloadError: a tensor has another shape or type of numbers than what was sent, or a counter fell.
        """
        weights = {name: item for name, item in payload.bundles.items() if isinstance(item, Weights)}
        moved = {name: update_norms(item, self.start(client, name)) for name, item in weights.items()}
        shapes = {
            name: {key: tuple(value.shape) for key, value in item.items() if value.is_floating_point()}
            for name, item in weights.items()
        }
        return Arrival(client, payload, moved, shapes)

    def start(self, client: ClientInfo, name: str) -> Mapping[str, Tensor]:
        """What the weights in a field of a client's reply started from; nothing for changes."""
        return {} if name in self._changes else self._origin(client, name)

    def passed(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """The same replies in the same order, judged."""
        for arrival in arrivals:
            self._note(arrival)
            if self._room.is_empty and (self._is_incomparable(arrival) or self._is_within(arrival)):
                yield arrival
            else:
                self._room.add(arrival)  # from here on all wait, so that the order stays
        now = {key: median_norms(seen, self._entries[key]) for key, seen in self._seen.items()}
        now |= {key: medians_across(seen) for key, seen in self._seen_across.items()}
        for arrival in self._room.leaving():
            # with the medians of everybody, whoever arrived first
            yield self._judged(arrival, now)
        self._remember({key: medians for key, medians in now.items() if medians})

    def _remember(self, now: Medians) -> None:
        for key, medians in now.items():
            is_change = key.removeprefix(_ACROSS).split("/")[1] in self._changes
            # of changes the most is kept: first ones are long, and newcomers come at any time
            self._known[key] = largest_of([medians, self._known.get(key, {})]) if is_change else medians

    def _key(self, client: ClientInfo, name: str) -> str:
        return f"{self._step}/{name}/{client.architecture}"

    def _across_key(self, name: str) -> str:
        return f"{_ACROSS}{self._step}/{name}"

    def _note(self, arrival: Arrival) -> None:
        for name, moved in arrival.moved.items():
            key, shapes = self._key(arrival.client, name), arrival.shapes[name]
            self._seen.setdefault(key, []).append(moved)
            if self._across:
                self._seen_across.setdefault(self._across_key(name), []).append((moved, shapes))
            self._entries.setdefault(key, {tensor: prod(shape) for tensor, shape in shapes.items()})

    def _is_incomparable(self, arrival: Arrival) -> bool:
        keys = [key for name in arrival.moved for key in (self._key(arrival.client, name), self._across_key(name))]
        # of two clients nobody can say which is odd
        nothing = self._is_small and not any(self._known.get(key) for key in keys)
        return not self._bounds.bind or not arrival.moved or nothing

    def _is_within(self, arrival: Arrival) -> bool:
        """Whether a reply is within the bounds by the medians of the last ask: in its architecture, else in all."""
        for name in arrival.moved:
            own = self._known.get(self._key(arrival.client, name), {})
            if own:
                across = self._known.get(self._across_key(name), {})
                medians = within_all(own, across, arrival.shapes[name])
            else:
                medians = self._from_all(arrival, name, self._known)
            if not medians or self._reasons(arrival, name, medians) != (None, None):
                return False
        return True

    def _from_all(self, arrival: Arrival, name: str, tables: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        known = tables.get(self._across_key(name), {})
        return expected_from_all(known, arrival.moved[name], arrival.shapes[name], self._sent(arrival, name))

    def _sent(self, arrival: Arrival, name: str) -> Norms:
        return update_norms(self._origin(arrival.client, name), {})

    def _judged(self, arrival: Arrival, now: Mapping[str, Mapping[str, float]]) -> Arrival:
        fields, notes = dict(arrival.payload.fields), []
        for name, moved in arrival.moved.items():
            medians = self._expected(arrival, name, now)
            refused, too_long = self._reasons(arrival, name, medians)
            if refused is not None:
                return replace(arrival, refused=refused)  # one field is enough: its sender is out of the round
            if too_long is not None and self._bounds.update is not None:
                start, item = self.start(arrival.client, name), arrival.payload.bundles[name]
                most = self._bounds.update * self._reach(arrival, name)
                fields[name] = Weights(clipped(item, start, moved, medians, most))
                notes.append(too_long)
        return replace(arrival, payload=Payload(fields), shortened="; ".join(notes)) if notes else arrival

    def _reach(self, arrival: Arrival, name: str) -> float:
        """How much farther an update may be; training, however long, does not turn weights round."""
        turned = arrival.moved[name].get(ALONG, 1.0) < 0
        return 1.0 if turned else self._reaches.get(arrival.client.id, 1.0)

    def _reasons(self, arrival: Arrival, name: str, medians: Mapping[str, float]) -> tuple[str | None, str | None]:
        """Why the weights in a field are to be refused, and why to be shortened."""
        moved, bounds, reach = arrival.moved[name], self._bounds, self._reach(arrival, name)
        if name not in self._changes:
            length, size = times_median(moved, medians, WHOLE) / reach, _oversize(moved, medians, reach)
            if bounds.refuse is not None and length > bounds.refuse:
                return _reason(f"{name}: the update is", length, reach, "refuse", bounds.refuse), None
            if bounds.size is not None and size > bounds.size:
                return _reason(f"{name}: they are", size, 1.0, "size", bounds.size), None
        ratio, worst = excess(moved, medians)
        if bounds.update is None or ratio / reach <= bounds.update:
            return None, None
        where = "" if worst == WHOLE else f" in '{worst}'"
        return None, _reason(f"{name}: the update{where} is", ratio / reach, reach, "update", bounds.update)

    def _expected(self, arrival: Arrival, name: str, now: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
        """How long a reply's update may be expected to be, by this ask or the last.

        By its architecture; where this ask says nothing of that, also by all architectures; and where most clients did
        not move and nothing is known, by a part of what was sent. A change may also be as long as what it changes:
        changes of a control variate, for one, are long when a client takes part for the first time, and short after.
        """
        key, across_key = self._key(arrival.client, name), self._across_key(name)
        tables = [now[key], self._known.get(key, {})]
        if not now[key]:
            tables.append(self._from_all(arrival, name, now) or self._from_all(arrival, name, self._known))
        across = largest_of([now.get(across_key, {}), self._known.get(across_key, {})])
        expected = within_all(largest_of(tables), across, arrival.shapes[name])
        if not expected and len(self._seen[key]) >= ENOUGH:
            return at_rest(arrival.moved[name], arrival.shapes[name], self._sent(arrival, name))
        if not expected or name not in self._changes:
            return expected
        sent = {tensor: norm for tensor, norm in self._sent(arrival, name).items() if tensor not in (SIZE, SENT, ALONG)}
        return largest_of([expected, sent])


def _oversize(moved: Norms, medians: Mapping[str, float], reach: float) -> float:
    """How many times as long as the median new weights are; 0 where they are hardly more than their updates.

    Who may come farther may also arrive at longer weights.
    """
    step, sent = medians.get(WHOLE, 0.0), moved.get(SENT, 0.0)
    if sent < step or not medians.get(SIZE):
        return 0.0
    return moved.get(SIZE, 0.0) / max(medians[SIZE], hypot(sent, step * reach) if reach > 1 else 0.0)


def _reason(what: str, ratio: float, reach: float, setting: str, bound: float) -> str:
    room = f" for one of {reach:.3g} times the usual samples" if reach > 1 else ""
    return f"{what} {ratio:.3g} times as long as usual in its cohort{room}, run.bounds.{setting} is {bound:g}"


# ---- replies that wait for each other


@dataclass
class WaitingRoom:
    """Replies in order: in memory up to a number of bytes, the others in a file without a name.

    The file is gone when it is closed, even by a kill.

    Attributes:
        limit: bytes of tensors in memory.
        folder: where the file is; None: where temporary files are.
    """

    limit: int
    folder: Path | None = None
    _held: list[Arrival | _Filed] = field(default_factory=list)
    _bytes: int = 0
    _file: IO[bytes] | None = None

    @property
    def is_empty(self) -> bool:
        return not self._held

    def add(self, arrival: Arrival) -> None:
        size = sum(tensor_bytes(item) for item in arrival.payload.bundles.values())
        if self._bytes + size <= self.limit:
            self._bytes += size
            self._held.append(arrival)
        else:
            # one for all: each would take a handle, of which a process has some thousand
            self._file = self._file or tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - closed by ``leaving``
            self._held.append(_Filed.of(arrival, self._file))

    def leaving(self) -> Iterator[Arrival]:
        """All replies in order; each is let go of when the next is asked for."""
        self._held.reverse()
        while self._held:
            item = self._held.pop()
            yield item.read() if isinstance(item, _Filed) else item
        if self._file is not None:
            self._file.close()
            self._file = None


_Place = tuple[torch.dtype, torch.Size, torch.device]


@dataclass(frozen=True)
class _Filed:
    """A reply whose tensors are in a file, one after the other from a place on."""

    arrival: Arrival
    file: IO[bytes]
    start: int
    places: Mapping[str, Mapping[str, _Place]]

    @classmethod
    def of(cls, arrival: Arrival, file: IO[bytes]) -> _Filed:
        bundles, start = arrival.payload.bundles, file.seek(0, os.SEEK_END)
        for tensor in (tensor for item in bundles.values() for tensor in item.values()):
            file.write(_bytes(tensor.cpu().contiguous()))
        places = {
            name: {key: (value.dtype, value.shape, value.device) for key, value in item.items()}
            for name, item in bundles.items()
        }
        return cls(_refilled(arrival, {name: {} for name in bundles}), file, start, places)

    def read(self) -> Arrival:
        self.file.seek(self.start)
        tensors = {
            name: {key: self._tensor(*place) for key, place in places.items()} for name, places in self.places.items()
        }
        return _refilled(self.arrival, tensors)

    def _tensor(self, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self.file.readinto(_bytes(tensor))  # type: ignore[attr-defined]
        return tensor.to(device)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _refilled(arrival: Arrival, tensors: Mapping[str, Mapping[str, Tensor]]) -> Arrival:
    bundles: dict[str, TensorBundle] = {
        name: type(item)(tensors=tensors[name], **item.attributes()) for name, item in arrival.payload.bundles.items()
    }
    return replace(arrival, payload=Payload({**arrival.payload.fields, **bundles}))
