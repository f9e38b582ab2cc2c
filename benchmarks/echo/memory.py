"""Peak memory of a deployment's processes against a bound that is derived from what each must hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import harness
import psutil
from deployment import Programs, bring_up

from echo.legs import experiment, rivals_deployed

_EVERY = 0.1  # seconds between looks

_PROGRAMS = (
    *("polyfed.deploy.superlink", "flower-superexec", "flwr-serverapp"),
    *("caddy", "polyfed.deploy.connection", "polyfed.deploy.worker"),
)

_SITE_COPIES = 8
"""Copies of a client's message that the processes of a site may hold at once:

4 in the connection: what arrives as chunks, without headers, joined, and as bytes; or, later, what arrived, the reply
   from the worker, as bytes for Flower, and as chunks.
4 in the worker: what arrived, as it arrives and aligned; and the reply, whose memory is that of the last message
   until the next is done.
"""


def server_copies(sites: int) -> int:
    """Copies of a client's message that the server's processes may hold at once.

    SuperLink: the bank's chunks, stored once for all sites, and a reply of every site until the server half takes it;
    twice, since what is freed of one round, in small chunks by many threads, stays with the allocator in the next.

    The server half: the bank and the sum of the replies, which are the method's; the reply before, and an aligned copy
    of this one; and four within Flower, for which a reply is chunks, chunks without their headers, joined, and bytes.
    """
    return 2 * (1 + sites) + 8


@dataclass
class Peaks:
    """Largest memory of process trees by name, bytes, and of the processes in each at that moment.

    Proportional set size where there is one: pages that processes share count once.
    """

    trees: dict[str, int] = field(default_factory=dict)
    parts: dict[str, dict[str, int]] = field(default_factory=dict)

    def look(self, name: str, processes: Sequence[psutil.Process]) -> None:
        """Take note of a tree as it is now."""
        by_role: dict[str, int] = {}
        for process in processes:
            with suppress(psutil.Error, OSError):  # it has just ended
                role = _role(process.cmdline())
                by_role[role] = by_role.get(role, 0) + _held(process)
        total = sum(by_role.values())
        if total > self.trees.get(name, 0):
            self.trees[name], self.parts[name] = total, by_role


@contextmanager
def watched(programs: Programs, names: Sequence[str]) -> Iterator[Peaks]:
    """Peaks of some programs within the block."""
    peaks, done = Peaks(), threading.Event()

    def watch() -> None:
        while not done.wait(_EVERY):
            for name in names:
                with suppress(psutil.Error):
                    peaks.look(name, programs.tree(name))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peaks
    finally:
        done.set()
        watcher.join()


def bench(programs: Programs, sites: int, sizes: Mapping[str, int]) -> None:
    """Two rounds of the largest size; a line for the server and one for each site."""
    name, size = max(sizes.items(), key=lambda item: item[1])
    loopback = bring_up(programs, experiment(sites))
    work = rivals_deployed(loopback)["polyfed"]
    names = ["server", *loopback.sites]
    with watched(programs, names) as bare:  # all processes of an exchange, with nothing to carry
        work([1000, 1000])
    with watched(programs, names) as full:
        work([size, size])
    for tree in names:
        copies = server_copies(sites) if tree == "server" else _SITE_COPIES
        _report(tree, name, size, copies, bare, full)


def _report(tree: str, name: str, size: int, copies: int, bare: Peaks, full: Peaks) -> None:
    extra = full.trees[tree] - bare.trees[tree]
    harness.report(
        f"a deployment's {tree}, {name} a client: peak memory",
        ratio=extra / size,
        unit="copies",
        against="the same processes with next to nothing to carry",
        limit=copies,
        peak_megabytes_by_process={role: round(held / 1e6) for role, held in full.parts[tree].items()},
        base_megabytes_by_process={role: round(held / 1e6) for role, held in bare.parts[tree].items()},
    )


def _held(process: psutil.Process) -> int:
    info = process.memory_full_info()
    return int(getattr(info, "pss", info.rss))


def _role(command: Sequence[str]) -> str:
    words = [Path(word).name for word in command]
    return next((word for word in words if word in _PROGRAMS), " ".join(words[1:4]))
