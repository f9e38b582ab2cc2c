"""Norm clipping of a cohort's replies: updates far longer than the median are scaled down, or their senders refused.

Norms are taken of the update of each tensor and of all weights together, relative to the medians of this ask and the
last one: within an architecture, and, where the method averages across architectures, of what all have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import hypot, prod
from pathlib import Path

from torch import Tensor

from polyfed.federation.bounds import ENOUGH, Bounds
from polyfed.federation.client import ClientInfo
from polyfed.federation.median_norms import (
    Shapes,
    at_rest,
    expected_from_all,
    largest_of,
    median_norms,
    medians_across,
    within_all,
)
from polyfed.federation.update_norms import (
    ALONG,
    SENT,
    SIZE,
    WHOLE,
    Norms,
    clipped,
    excess,
    times_median,
    update_norms,
)
from polyfed.federation.waiting import Arrival, WaitingRoom
from polyfed.wire.payload import Payload, TensorBundle, Weights

Origin = Callable[[ClientInfo, str], Mapping[str, Tensor]]

Usual = dict[str, dict[str, float]]
"""Step, field and architecture -> what updates were last like there; see ``median_norms``.

Step and field, after ``_ACROSS`` -> what they were like across architectures; see ``median_norms.medians_across``."""

_ACROSS = "anywhere "  # a prefix that no step's name has, as names have no blanks


class ReplyGate:
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
        reaches: Mapping[str, float] | None = None,
        across: bool = True,
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
            reaches: client -> how many times longer than usual its updates may be; 1 where it is not among them.
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
        return Arrival(client, payload, moved, {name: _shapes(item) for name, item in weights.items()})

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
        now = {key: median_norms(seen, self._entries[key]) for key, seen in self._seen.items()}
        now |= {key: medians_across(seen) for key, seen in self._seen_across.items()}
        for arrival in self._room.leaving():
            yield self._judged(arrival, now)
        self._known.update({key: self._lasting(key, values) for key, values in now.items() if values})

    def _lasting(self, key: str, now: dict[str, float]) -> dict[str, float]:
        """What is known from now on; of changes the most, as first ones are long, and newcomers come at any time."""
        if key.removeprefix(_ACROSS).split("/")[1] not in self._changes:
            return now
        return largest_of([now, self._known.get(key, {})])

    def _key(self, client: ClientInfo, name: str) -> str:
        return f"{self._step}/{name}/{client.architecture}"

    def _note(self, arrival: Arrival) -> None:
        for name, moved in arrival.moved.items():
            key, shapes = self._key(arrival.client, name), arrival.shapes[name]
            self._seen.setdefault(key, []).append(moved)
            if self._across:
                self._seen_across.setdefault(self._across_key(name), []).append((moved, shapes))
            self._entries.setdefault(key, {tensor: prod(shape) for tensor, shape in shapes.items()})

    def _across_key(self, name: str) -> str:
        return f"{_ACROSS}{self._step}/{name}"

    def _is_incomparable(self, arrival: Arrival) -> bool:
        keys = [key for name in arrival.moved for key in (self._key(arrival.client, name), self._across_key(name))]
        nothing = self._is_small and not any(self._known.get(key) for key in keys)
        return not self._bounds.bind or not arrival.moved or nothing

    def _is_usual(self, arrival: Arrival) -> bool:
        known = {name: self._before(arrival, name) for name in arrival.moved}
        return all(values and self._reasons(arrival, name, values) == (None, None) for name, values in known.items())

    def _before(self, arrival: Arrival, name: str) -> Mapping[str, float]:
        """What was usual for a reply the last time: in its architecture, else in all."""
        own = self._known.get(self._key(arrival.client, name), {})
        if not own:
            return self._from_all(arrival, name, self._known)
        return within_all(own, self._known.get(self._across_key(name), {}), arrival.shapes[name])

    def _from_all(self, arrival: Arrival, name: str, tables: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
        known = tables.get(self._across_key(name), {})
        return expected_from_all(known, arrival.moved[name], arrival.shapes[name], self._sent(arrival, name))

    def _sent(self, arrival: Arrival, name: str) -> Norms:
        """Norms of what an update started from, or of what a change changes."""
        return update_norms(self._origin(arrival.client, name), {})

    def _judged(self, arrival: Arrival, now: Mapping[str, Mapping[str, float]]) -> Arrival:
        fields, notes = dict(arrival.payload.fields), []
        for name, moved in arrival.moved.items():
            known = self._expected(arrival, name, now)
            refused, too_long = self._reasons(arrival, name, known)
            if refused is not None:
                return replace(arrival, refused=refused)
            if too_long is not None and self._bounds.update is not None:
                start, item = self.start(arrival.client, name), arrival.payload.bundles[name]
                most = self._bounds.update * self._reach(arrival, name)
                fields[name] = Weights(clipped(item, start, moved, known, most))
                notes.append(too_long)
        return replace(arrival, payload=Payload(fields), shortened="; ".join(notes)) if notes else arrival

    def _reach(self, arrival: Arrival, name: str) -> float:
        """How much farther an update may be; training, however long, does not turn weights round."""
        turned = arrival.moved[name].get(ALONG, 1.0) < 0
        return 1.0 if turned else self._reaches.get(arrival.client.id, 1.0)

    def _reasons(self, arrival: Arrival, name: str, known: Mapping[str, float]) -> tuple[str | None, str | None]:
        """Why the weights in a field are to be refused, and why to be shortened."""
        moved, bounds, reach = arrival.moved[name], self._bounds, self._reach(arrival, name)
        if name not in self._changes:
            length, size = times_median(moved, known, WHOLE) / reach, self._oversize(moved, known, reach)
            if bounds.refuse is not None and length > bounds.refuse:
                return self._reason(f"{name}: the update is", length, reach, "refuse", bounds.refuse), None
            if bounds.size is not None and size > bounds.size:
                return self._reason(f"{name}: they are", size, 1.0, "size", bounds.size), None
        ratio, worst = excess(moved, known)
        if bounds.update is None or ratio / reach <= bounds.update:
            return None, None
        where = "" if worst == WHOLE else f" in '{worst}'"
        return None, self._reason(f"{name}: the update{where} is", ratio / reach, reach, "update", bounds.update)

    @staticmethod
    def _oversize(moved: Norms, known: Mapping[str, float], reach: float) -> float:
        """How many times as long as usual new weights are; 0 where they are hardly more than their updates.

        Who may come farther may also arrive at longer weights.
        """
        step, sent = known.get(WHOLE, 0.0), moved.get(SENT, 0.0)
        if sent < step or not known.get(SIZE):
            return 0.0
        return moved.get(SIZE, 0.0) / max(known[SIZE], hypot(sent, step * reach) if reach > 1 else 0.0)

    def _expected(self, arrival: Arrival, name: str, now: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
        """What is usual for a reply by this ask or the last.

        By its architecture; where this ask says nothing of that, also by all architectures; and where most clients did
        not move and nothing is known, by a part of what was sent. A change may also be as long as what it changes:
        changes of a control variate, for one, are long when a client takes part for the first time, and short after.
        """
        key = self._key(arrival.client, name)
        known = [now[key], self._known.get(key, {})]
        if not now[key]:
            known += [self._from_all(arrival, name, now) or self._from_all(arrival, name, self._known)]
        across = largest_of([now.get(self._across_key(name), {}), self._known.get(self._across_key(name), {})])
        lasting = within_all(largest_of(known), across, arrival.shapes[name])
        if not lasting and len(self._seen[key]) >= ENOUGH:
            return at_rest(arrival.moved[name], arrival.shapes[name], self._sent(arrival, name))
        if not lasting or name not in self._changes:
            return lasting
        sent = self._sent(arrival, name)
        return largest_of([lasting, {tensor: sent[tensor] for tensor in sent if tensor not in (SIZE, SENT, ALONG)}])

    @staticmethod
    def _reason(what: str, ratio: float, reach: float, setting: str, bound: float) -> str:
        room = f" for one of {reach:.3g} times the usual samples" if reach > 1 else ""
        return f"{what} {ratio:.3g} times as long as usual in its cohort{room}, run.bounds.{setting} is {bound:g}"


def _shapes(item: TensorBundle) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in item.items() if value.is_floating_point()}
