"""Every engine against its bare runtime: an echo of arrays of 10 kB to 100 MB, through polyfed and without it.

Limits: a client and round through polyfed take at most 1.2 x the time on the bare runtime, in the same run, for the
same arithmetic to the same bits; two workers of Ray at most 0.6 of the time of one, for clients that compute for a
second each, or sleep. ``--memory`` measures the processes of a deployment instead.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import harness
from deployment import Programs, bring_up
from echo import memory
from echo.legs import Leg, Rival, crew, experiment, rivals, rivals_deployed

from polyfed.core.errors import PolyfedError

LIMIT, CREW_LIMIT = 1.2, 0.6
ENGINES = ("ray", "flower", "deployment")
SITES, CLIENTS, CREW_CLIENTS = 3, 4, 8
SIZES = ("10kB", "10MB", "100MB")
_UNITS = {"kB": 1_000, "MB": 1_000_000}


def rounds_of(engine: str, size: int, quick: bool) -> int:
    """Rounds that are measured, after one that is not."""
    few = {"ray": 4, "flower": 3, "deployment": 2}[engine]
    if quick:
        return 1 if engine == "deployment" else 2
    return few * (8 if size < 1_000_000 and engine == "ray" else 1) + (size < 50_000_000)


def measure(engine: str, works: Mapping[str, Rival], sizes: Mapping[str, int], quick: bool) -> None:
    """Have both rivals do the same rounds, and report by size."""
    schedule = [size for size in sizes.values() for _ in range(1 + rounds_of(engine, size, quick))]
    legs = {name: work(schedule) for name, work in works.items()}
    for name, size in sizes.items():
        report(engine, name, size, legs)
    ratio = legs["polyfed"].start / legs["bare"].start
    against = "the bare runtime, wall time"
    harness.report(f"engine {engine}: start and first exchange", ratio=ratio, against=against)


def report(engine: str, name: str, size: int, legs: Mapping[str, Leg]) -> None:
    """One line: seconds per client and round of both rivals, medians after the first round."""
    clients = SITES if engine == "deployment" else CLIENTS
    rounds = {rival: [item for item in leg.rounds if item.size == size] for rival, leg in legs.items()}
    times = {rival: [item.seconds / clients for item in own[1:]] for rival, own in rounds.items()}
    ours, bare = (statistics.median(times[rival]) for rival in ("polyfed", "bare"))
    harness.report(
        f"engine {engine}: echo of {name}",
        ratio=ours / bare,
        against="a bare echo on the same runtime, wall time",
        limit=LIMIT,
        seconds_per_client=ours,
        rival_seconds_per_client=bare,
        identical_bits=[item.crc for item in rounds["polyfed"]] == [item.crc for item in rounds["bare"]],
    )


def echoes(engines: Sequence[str], sizes: Mapping[str, int], quick: bool) -> None:
    """Each engine in turn."""
    for engine in engines:
        with programs() as running:
            if engine != "deployment":
                measure(engine, rivals(engine, running, CLIENTS), sizes, quick)
                if engine == "ray":
                    crews(running)
                continue
            loopback = bring_up(running, experiment(SITES))
            print(f"# server, gate and {SITES} sites connected after {loopback.seconds:.1f} s", flush=True)
            measure(engine, rivals_deployed(loopback), sizes, quick)


def crews(running: Programs) -> None:
    """Two workers against one."""
    for pastime in ("busy", "idle"):
        one, two = (crew(running, CREW_CLIENTS, workers, pastime)([1000, 1000]).rounds[1].seconds for workers in (1, 2))
        name = f"engine ray: two workers, clients that are {pastime} for a second each"
        harness.report(name, ratio=two / one, against="one worker, wall time", limit=CREW_LIMIT)


@contextlib.contextmanager
def programs() -> Iterator[Programs]:
    """Programs in a folder that vanishes after them; an error of one of them is shown without a traceback."""
    with tempfile.TemporaryDirectory(prefix="echo-", ignore_cleanup_errors=True) as folder:
        try:
            with Programs(Path(folder)) as running:
                yield running
        except PolyfedError as error:
            sys.exit(f"error: {error}")


def main() -> None:
    """Measure echoes, or memory."""
    parser = harness.parser(__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help="each way, as 10kB or 100MB")
    parser.add_argument("--memory", action="store_true", help="peak memory of a deployment's processes instead")
    given = harness.parsed(parser)
    sizes = {}
    for text in given.sizes:
        size = re.fullmatch(r"(\d+)(kB|MB)", text) or parser.error(f"'{text}' is not a size; give one such as 10MB")
        sizes[text] = int(size[1]) * _UNITS[size[2]]
    if given.memory:
        with programs() as running:
            memory.bench(running, SITES, sizes)
    else:
        echoes(given.engines, sizes, given.quick)


if __name__ == "__main__":
    main()
