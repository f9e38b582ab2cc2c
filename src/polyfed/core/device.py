"""Where tensors are computed: devices and CPU threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from polyfed.core.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """The device called ``name``; ``auto`` takes the first CUDA device if there is one.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"run.device '{name}' is not usable here ({str(error).splitlines()[0]}); try auto") from error
    return device


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with so many CPU threads within a block: floating-point sums depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
