"""Every engine against its bare runtime: an echo of arrays of 10 kB to 100 MB, through polyfed and without it.

Limit: a client and round through polyfed take at most 1.2 x what they take on the bare runtime, in the same run, for
the same arithmetic to the same bits. ``--memory`` watches the processes of a deployment instead, ``--creamfl DATA``
runs CreamFL on real data on all engines and compares what they write.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import harness
from deployment import Programs, bring_up, ending_properly
from echo import creamfl, memory
from echo.legs import Leg, Rival, experiment, rivals, rivals_deployed

from polyfed.core.errors import PolyfedError

LIMIT = 1.2
ENGINES = ("local", "ray", "flower", "deployment")
SITES, CLIENTS = 3, 4
SIZES = ("10kB", "10MB", "100MB")
_UNITS = {"kB": 1_000, "MB": 1_000_000}


def rounds_of(engine: str, size: int, quick: bool) -> int:
    """Rounds that are measured, after one that is not."""
    few = {"local": 5, "ray": 4, "flower": 3, "deployment": 2}[engine]
    if quick:
        return 1 if engine == "deployment" else 2
    return few * (8 if size < 1_000_000 and engine in ("local", "ray") else 1) + (size < 50_000_000)


def measure(engine: str, works: Mapping[str, Rival], sizes: Mapping[str, int], quick: bool) -> None:
    """Have both rivals do the same rounds, and report by size."""
    schedule = [size for size in sizes.values() for _ in range(1 + rounds_of(engine, size, quick))]
    legs = {name: work(schedule) for name, work in works.items()}
    for name, size in sizes.items():
        report(engine, name, size, legs)
    starts = {name: leg.start for name, leg in legs.items()}
    harness.report(
        f"engine {engine}: start and first exchange",
        ratio=starts["polyfed"] / starts["bare"],
        against="the bare runtime, wall time",
        seconds=starts["polyfed"],
        rival_seconds=starts["bare"],
        **harness.conditions(),
    )


def report(engine: str, name: str, size: int, legs: Mapping[str, Leg]) -> None:
    """One line: seconds a client and round of both rivals, medians after the first round."""
    clients = clients_of(engine)
    rounds = {rival: [item for item in leg.rounds if item.size == size] for rival, leg in legs.items()}
    times = {rival: [item.seconds / clients for item in found[1:]] for rival, found in rounds.items()}
    ours, bare = (statistics.median(times[rival]) for rival in ("polyfed", "bare"))
    equal = [item.crc for item in rounds["polyfed"]] == [item.crc for item in rounds["bare"]]
    harness.report(
        f"engine {engine}: echo of {name}",
        ratio=ours / bare,
        against="a bare call by reference" if engine == "local" else "a bare echo on the same runtime, wall time",
        limit=None if engine == "local" else LIMIT,
        seconds_a_client=ours,
        rival_seconds_a_client=bare,
        extra_ms_a_client=1e3 * (ours - bare),
        range_seconds=[round(value, 6) for value in (min(times["polyfed"]), max(times["polyfed"]))],
        rival_range_seconds=[round(value, 6) for value in (min(times["bare"]), max(times["bare"]))],
        identical_bits=equal,
        bytes_each_way=size,
        rounds=len(times["polyfed"]),
        clients=clients,
        **harness.conditions(),
    )


def clients_of(engine: str) -> int:
    """One a site in the deployment."""
    return SITES if engine == "deployment" else CLIENTS


def echoes(engines: Sequence[str], sizes: Mapping[str, int], quick: bool) -> None:
    """Each engine in turn."""
    for engine in engines:
        with programs() as running:
            if engine != "deployment":
                measure(engine, rivals(engine, running, CLIENTS), sizes, quick)
                continue
            loopback = bring_up(running, experiment(SITES))
            print(f"# server, gate and {SITES} sites connected after {loopback.seconds:.1f} s", flush=True)
            measure(engine, rivals_deployed(loopback), sizes, quick)


@contextlib.contextmanager
def failing_shortly() -> Iterator[None]:
    """What went wrong in one of the programs is told without this program's traceback."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except PolyfedError as error:
        sys.exit(f"error: {error}")


@contextlib.contextmanager
def programs() -> Iterator[Programs]:
    """Programs in a folder that vanishes after them."""
    with (
        tempfile.TemporaryDirectory(prefix="echo-", ignore_cleanup_errors=True) as folder,
        Programs(Path(folder)) as it,
    ):
        yield it


def bytes_of(text: str) -> int:
    """10MB -> 10 million.

    Raises:
        argparse.ArgumentTypeError: not a size.
    """
    number, unit = text[:-2], text[-2:]
    if not number.isdecimal() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; give a whole number of kB or MB, as 10MB")
    return int(number) * _UNITS[unit]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help="each way, as 10kB or 100MB")
    parser.add_argument("--memory", action="store_true", help="peak memory of a deployment's processes instead")
    parser.add_argument("--creamfl", type=Path, metavar="DATA", help="CreamFL on real data on all engines instead")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="--creamfl: as polyfed run")
    found = parser.parse_args()
    try:
        found.sizes = {text: bytes_of(text) for text in found.sizes}
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    return found


def main() -> None:
    """Measure what was asked for."""
    given = arguments()
    with ending_properly(), failing_shortly():
        if given.memory:
            with programs() as running:
                memory.bench(running, SITES, given.sizes)
        elif given.creamfl:
            with programs() as running:
                creamfl.bench(running, given.creamfl.resolve(), given.engines, given.set)
        else:
            echoes(given.engines, given.sizes, given.quick)


if __name__ == "__main__":
    main()
