"""Devices and CPU threads of computations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import BeforeValidator, Field

from polyfed.core.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """The device called ``name``; ``auto`` takes the first CUDA device if there is one.

    Raises:
        ConfigError: the device is not available.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"run.device '{name}' is not usable here ({str(error).splitlines()[0]}); try auto") from error
    return device


def finish_queued(device: torch.device) -> None:
    """Wait until a GPU has finished its queue, so that a clock measures its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors for the next ones, as glibc does once it has freed a large block.

    Otherwise it may go back to the system with each client, and steps wait for new pages; no page of the block is used.
    """
    torch.empty(24 << 20, dtype=torch.uint8)  # of more than 32 MiB, alignment included, glibc takes no notice


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Threads = Annotated[int, BeforeValidator(lambda value: min(2, usable_cores()) if value is None else value), Field(ge=1)]
"""CPU threads; null: as many as there are cores, at most two: more gain little for what polyfed trains on CPUs."""


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with ``count`` CPU threads within a block: floating-point sums depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
