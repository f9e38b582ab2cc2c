"""Account of a client's answered asks, written to its site's disk before a step begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from filelock import FileLock

from polyfed.core.errors import RefusedError
from polyfed.core.files import private_files, write_atomically
from polyfed.wire.messages import Request

FILE = "answered.json"
"""Account of one client, over all runs that share the folder; without it, its site answers as if never asked."""


@dataclass(frozen=True)
class AnsweredAsk:
    """An ask that a client answers, or has begun to.

    Attributes:
        request: Digest of the request.
        members: Clients of a masked sum whose keys were exchanged, sorted; empty: unknown, or not a masked sum.
        survivors: Clients whose shares were opened, sorted; empty: none were.
        step: Step of the method; empty: unknown.
        start: State from which the step starts, in addition to the request; empty: unknown.
    """

    request: str
    members: list[str] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    step: str = ""
    start: str = ""


@dataclass(frozen=True)
class AnsweredAsks:
    """Accounts of a site's clients: plan, round and ask -> request, whatever a run is called.

    Attributes:
        folder: Folder of the accounts.
        plan: Digest of the settings that decide replies.
        asks: Number of asks of a step per round, where it is not 1.
    """

    folder: Path
    plan: str
    asks: Mapping[str, int] = field(default_factory=dict)

    def require_same(self, request: Request, asked: AnsweredAsk) -> None:
        """Check that neither this ask was answered for another request, nor any ask of its round for other clients.

        Args:
            request: The request; its client, round and ask identify the entry.
            asked: The ask as it is now.

        Raises:
            RefusedError: it was, in this run or in another one of this plan; the round has had all asks for this step;
                or the account is damaged.
        """
        self._require_same(self._load(request.client), request, asked)

    def record(self, request: Request, asked: AnsweredAsk) -> None:
        """Write an ask down; it is on the disk when this returns.

        Raises:
            RefusedError: as for ``require_same``, also for an ask that another run has recorded meanwhile.
        """
        path, key = self._path(request.client), self._key(request)
        with private_files():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(path.with_suffix(".lock")):
                known = dict(self._load(request.client))
                self._require_same(known, request, asked)
                if (before := known.get(key)) is not None:
                    asked = replace(asked, **{k: value for k, value in asdict(before).items() if not getattr(asked, k)})
                if asked != before:
                    content = {name: asdict(ask) for name, ask in (known | {key: asked}).items()}
                    write_atomically(path, json.dumps(content).encode())

    def _require_same(self, known: Mapping[str, AnsweredAsk], request: Request, asked: AnsweredAsk) -> None:
        own, same_round = self._key(request), self._key(replace(request, phase=0))[:-1]
        of_round = {key: before for key, before in known.items() if key.startswith(same_round)}  # in order of answer
        if own in known:
            _require_alike(request, known[own], asked)
        elif asked.step:
            most, had = self.asks.get(asked.step, 1), sum(one.step in ("", asked.step) for one in of_round.values())
            if had >= most:
                times = "once" if most == 1 else f"{most} times"
                raise RefusedError(
                    f"ask {request.phase} of round {request.round}: a round asks for '{asked.step}' {times}, which "
                    "this client has answered; a method that asks more often declares it with client_step(times=...)"
                )
        sums = [key for key, before in of_round.items() if before.members]
        if sums and own != sums[0]:
            first = of_round[sums[0]]
            left = first.survivors or first.members
            _require_alike(request, replace(asked, members=left, survivors=left), asked)

    def _key(self, request: Request) -> str:
        return f"{self.plan}.{request.round}.{request.phase}"

    def _path(self, client: str) -> Path:
        return self.folder / client / FILE

    def _load(self, client: str) -> Mapping[str, AnsweredAsk]:
        path = self._path(client)
        if not path.is_file():
            return {}
        try:
            return {key: AnsweredAsk(**entry) for key, entry in json.loads(path.read_bytes()).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise RefusedError(f"'{FILE}' is damaged, so the asks that this client has answered are unknown") from error


def _require_alike(request: Request, before: AnsweredAsk, now: AnsweredAsk) -> None:
    pairs = [(before.members, now.members), (before.survivors, now.survivors)]
    others = next(((then, here) for then, here in pairs if then and here and then != here), None)
    has_same_start = not (before.start and now.start) or before.start == now.start
    if before.request == now.request and has_same_start and others is None:
        return
    instead = "another request" if others is None else f"{', '.join(others[0])}, not {', '.join(others[1])}"
    raise RefusedError(
        f"ask {request.phase} of round {request.round} was answered here for {instead}; a second answer would reveal "
        "more of its data; to start again, agree on a plan with another run.seed, or have the site's operator remove "
        f"the client's '{FILE}'"
    )
