"""What the benchmarks share: fair timing on a machine that others use too, peak memory, JSON lines."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch

Work = Callable[[], object]


class Timing(NamedTuple):
    """Medians over the repetitions, in seconds."""

    cpu: float
    wall: float


def interleaved(works: Mapping[str, Work], repeats: int, shortest: float = 0.05) -> dict[str, Timing]:
    """Time rivals in turn, ``repeats`` times after a warm-up, so that a busy machine slows all of them alike.

    A work of less than ``shortest`` seconds is looped. Compare CPU times where other processes share the
    cores; on a GPU, wall times.
    """
    loops = {name: _loops(work, shortest) for name, work in works.items()}
    samples: dict[str, list[Timing]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            samples[name].append(_timed(work, loops[name]))
    return {name: _median(taken) for name, taken in samples.items()}


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
        name: what was measured, as a table tells it.
        ratio: the figure.
        against: the rival, measured in the same run.
        limit: what the ratio may be; None: the rival alone says something.
        better: on which side of the limit it must be.
        unit: of a figure that is no ratio.
        fields: how it came about.
    """
    within = None if limit is None else (ratio <= limit if better == "smaller" else ratio >= limit)
    found = {"name": name, "ratio": ratio, "unit": unit, "against": against, "limit": limit, "better": better}
    rounded = {key: _rounded(value) for key, value in {**found, "within": within, **fields}.items()}
    print(json.dumps(rounded), flush=True)


def lacking(what: str) -> None:
    """Print what a benchmark needs and does not find, so that it measures nothing."""
    print(json.dumps({"lacks": what}), flush=True)


def conditions() -> dict[str, object]:
    """What a figure depends on that is not ours."""
    return {"threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1)}


def peak_extra(work: Work, device: torch.device | str = "cpu") -> int:
    """Bytes that ``work`` needs at its peak beyond what was in use before, its result included.

    On a GPU by torch's allocator. On Linux by the kernel's own high-water mark of resident memory, which
    misses nothing; elsewhere by sampling it every millisecond.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        return _peak_cuda(work, torch.device(device))
    _return_free_memory()
    return _peak_sampled(work) if not _reset_high_water() else _peak_high_water(work)


def _rounded(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


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


def _median(taken: list[Timing]) -> Timing:
    return Timing(statistics.median(t.cpu for t in taken), statistics.median(t.wall for t in taken))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_cuda(work: Work, device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


def _return_free_memory() -> None:
    """Have the C allocator give back what it keeps for re-use: it would hide the first growth."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_high_water(work: Work) -> int:
    before = _status("VmRSS")
    result = work()
    peak = _status("VmHWM") - before
    del result
    return peak


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _peak_sampled(work: Work) -> int:
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
        peak = max(peak, process.memory_info().rss)
        del result
    finally:
        done.set()
        watcher.join()
    return peak - before
