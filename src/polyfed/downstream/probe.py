"""The base of all downstream probes."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from polyfed.core.settings import Component
from polyfed.downstream.bench import Bench
from polyfed.downstream.results import Outcome


class Probe(Component):
    """A way to test a frozen encoder. Subclasses live in ``polyfed.downstream.probes``, one a module."""

    home: ClassVar[str] = "polyfed.downstream.probes"

    @abstractmethod
    def unsuitable(self, bench: Bench) -> str | None:
        """Why the bench's subject cannot be tested so (a modality, clients are missing); None if it can."""

    @abstractmethod
    def check(self, bench: Bench, task: str) -> None:
        """Find what is wrong with data and settings before any work starts.

        Raises:
            ConfigError, DataError: naming what is wrong.
        """

    @abstractmethod
    def run(self, bench: Bench, task: str) -> Outcome:
        """Test; every random draw derives from the bench's seed and the task's name."""
