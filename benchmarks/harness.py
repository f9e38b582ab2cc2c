"""Common parts of the benchmarks: fair timing on a busy machine, peak memory, JSON lines, the command line."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import torch

Work = Callable[[], object]


class Timing(NamedTuple):
    """Medians over the repetitions, in seconds."""

    cpu: float
    wall: float


def parser(documentation: str) -> argparse.ArgumentParser:
    """Command line with ``--quick`` and ``--threads``."""
    made = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="fewer repetitions, smaller sizes")
    made.add_argument("--threads", type=int, default=1, help="CPU threads")
    return made


def parsed(of: argparse.ArgumentParser) -> argparse.Namespace:
    """Arguments, with torch's threads set."""
    given = of.parse_args()
    torch.set_num_threads(given.threads)
    return given


def interleaved(works: Mapping[str, Work], repeats: int, shortest: float = 0.05) -> dict[str, Timing]:
    """Times of rivals in turn, ``repeats`` times after a warm-up, so that a busy machine slows all of them alike.

    A work of less than ``shortest`` seconds is looped. Compare CPU times where other processes share the
    cores; on a GPU, wall times.
    """
    loops = {name: _loops(work, shortest) for name, work in works.items()}
    samples: dict[str, list[Timing]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            samples[name].append(_timed(work, loops[name]))
    return {name: Timing(*map(statistics.median, zip(*taken, strict=True))) for name, taken in samples.items()}


def report(
    name: str,
    *,
    ratio: float,
    against: str,
    limit: float | None = None,
    better: Literal["smaller", "larger"] = "smaller",
    unit: str = "",
    **fields: object,
) -> None:
    """Print one figure as a JSON line, with whether it is within its limit.

    Args:
        name: Subject of the figure, as a table shows it.
        ratio: The figure.
        against: The rival, measured in the same run.
        limit: Bound of the ratio; None if the comparison alone is of interest.
        better: Side of the limit on which the ratio must be.
        unit: Unit of a figure that is not a ratio.
        fields: Circumstances of the measurement.
    """
    within = None if limit is None else (ratio <= limit if better == "smaller" else ratio >= limit)
    line = {"name": name, "ratio": ratio, "unit": unit, "against": against, "limit": limit, "better": better}
    line |= {"within": within, **fields, "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in line.items()}
    print(json.dumps(rounded), flush=True)


def lacking(requirement: str) -> None:
    """Print a missing requirement of a benchmark, which then measures nothing."""
    print(json.dumps({"lacks": requirement}), flush=True)


def peak_extra(work: Work, device: torch.device | str = "cpu") -> int:
    """Bytes that ``work`` needs at its peak in addition to those in use before, its result included.

    On a GPU by torch's allocator; else by the kernel's high-water mark of resident memory, which only Linux has.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before, result = torch.cuda.memory_allocated(device), work()
        peak = torch.cuda.max_memory_allocated(device)
    else:
        with suppress(OSError, AttributeError):  # memory that the C allocator keeps would hide the first growth
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before, result = _status("VmRSS"), work()
        peak = _status("VmHWM")
    del result
    return peak - before


def _loops(work: Work, shortest: float) -> int:
    first = _timed(work, 1).wall  # also the warm-up
    return 1 if first > shortest else max(1, int(shortest / max(_timed(work, 1).wall, 1e-6)))


def _timed(work: Work, loops: int) -> Timing:
    _wait()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(loops):
        work()
    _wait()
    return Timing((time.process_time() - cpu) / loops, (time.perf_counter() - wall) / loops)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
