"""Which masked sums a client has taken part in, so that what was asked is not answered again for others.

Two sums of a round, of requests that are the same or nearly so, of which the second leaves a client out, differ by that
client's reply. Draws come from the run's seed, so this holds as well between two runs that differ in their names alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from filelock import FileLock

from polyfed.core.errors import PayloadError
from polyfed.core.files import private_files, write_atomically

FILE = "answered-sums.json"
"""Of one client, over all runs that share the folder; without it, its site answers as if nothing had been sent."""


@dataclass(frozen=True)
class AnsweredSum:
    """A sum for which masked words were sent.

    Attributes:
        request: digest of what was asked.
        members: whose keys were exchanged, sorted; empty: none were yet.
        survivors: for whom shares were told, sorted; empty: none were told.
        step: of the method; empty: of a record that does not say.
    """

    request: str
    members: list[str] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    step: str = ""


@dataclass(frozen=True)
class AnsweredSums:
    """The sums of one client, by settings of the run, round and ask.

    Attributes:
        folder: of the record.
        terms: digest of the settings that decide replies, whatever the run is called.
        asks: step -> how often a round asks for it, where that is not once.
    """

    folder: Path
    terms: str
    asks: Mapping[str, int] = field(default_factory=dict)

    def require_same(self, ask: tuple[int, int], asked: AnsweredSum) -> None:
        """Check that the ask was not answered before for another request, nor any ask of its round for others.

        Args:
            ask: round and ask.
            asked: what is asked now; members, survivors and step are empty while they are not known.

        Raises:
            PayloadError: it was, in this run or in another one with these settings; the round has had all asks for this
                step; or the record is damaged.
        """
        self._require_same(self._load(), ask, asked)

    def record(self, ask: tuple[int, int], answered: AnsweredSum) -> None:
        """Write a sum down; it is on the disk when this returns.

        Raises:
            PayloadError: as ``require_same``, also for what another run has recorded meanwhile.
        """
        with private_files():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.folder / f"{FILE}.lock"):
                known = dict(self._load())
                self._require_same(known, ask, answered)
                before = known.get(self._key(ask))
                if before is not None:
                    survivors, step = answered.survivors or before.survivors, answered.step or before.step
                    answered = replace(answered, survivors=survivors, step=step)
                known[self._key(ask)] = answered
                if answered != before:
                    content = json.dumps({key: asdict(one) for key, one in known.items()})
                    write_atomically(self.folder / FILE, content.encode())

    def _require_same(self, known: Mapping[str, AnsweredSum], ask: tuple[int, int], asked: AnsweredSum) -> None:
        own, same_round = self._key(ask), self._key((ask[0], 0))[:-1]
        of_round = {key: before for key, before in known.items() if key.startswith(same_round)}  # as they were answered
        if own in known:
            _require_alike(ask, known[own], asked)
        elif asked.step:
            most, had = self.asks.get(asked.step, 1), sum(one.step in ("", asked.step) for one in of_round.values())
            if had >= most:
                times = "once" if most == 1 else f"{most} times"
                raise PayloadError(
                    f"ask {ask[1]} of round {ask[0]}: a round asks for '{asked.step}' {times}, which this client has "
                    "answered; a method that asks more often says so in its 'asks'"
                )
        if of_round and own != next(iter(of_round)):
            first = next(iter(of_round.values()))
            left = first.survivors or first.members
            _require_alike(ask, AnsweredSum(asked.request, left, left), asked)

    def _key(self, ask: tuple[int, int]) -> str:
        return f"{self.terms}.{ask[0]}.{ask[1]}"

    def _load(self) -> Mapping[str, AnsweredSum]:
        path = self.folder / FILE
        if not path.is_file():
            return {}
        try:
            return {key: AnsweredSum(**entry) for key, entry in json.loads(path.read_bytes()).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise PayloadError(f"'{FILE}' is damaged, so nobody knows which sums this client has answered") from error


def _require_alike(ask: tuple[int, int], before: AnsweredSum, now: AnsweredSum) -> None:
    pairs = [(before.members, now.members), (before.survivors, now.survivors)]
    others = next(((then, here) for then, here in pairs if then and here and then != here), None)
    if before.request == now.request and others is None:
        return
    instead = "another request" if others is None else f"{', '.join(others[0])}, not {', '.join(others[1])}"
    raise PayloadError(
        f"ask {ask[1]} of round {ask[0]} was answered here for {instead}; two sums would tell what one client sent. "
        f"a run begun anew needs another run.seed; who operates the site can allow this one: remove '{FILE}' of the "
        "client"
    )
