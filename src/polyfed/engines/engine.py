"""Engines as settings: the place where client steps execute."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import torch

from polyfed.core.settings import Settings
from polyfed.engines.outgoing import SiteTerms
from polyfed.engines.run_spec import RunSpec
from polyfed.engines.site import Site
from polyfed.federation.cohort import Engine
from polyfed.federation.population import Population
from polyfed.federation.settings import SiteSettings
from polyfed.wire.limits import Limits

_T = TypeVar("_T")


@dataclass(frozen=True)
class PortableSite:
    """All clients of a run as text, for another process on this machine or cluster to open.

    Attributes:
        settings, limits: JSON of the clients with their data, and of the limits on received messages.
        states, vocabulary: Folders of the clients' states, and of vocabularies learnt from the public set.
        stops: True if a step that fails ends the run.
    """

    settings: str
    limits: str
    states: str
    vocabulary: str
    stops: bool = False

    def open(self, spec: RunSpec) -> Site:
        """The site in this process, which from now on computes with the run's number of threads."""
        settings = SiteSettings.model_validate_json(self.settings)
        torch.set_num_threads(settings.run.threads)
        limits, terms = Limits.model_validate_json(self.limits), SiteTerms(stops=self.stops)
        states, vocabulary = Path(self.states), Path(self.vocabulary)
        return _site_class(spec).open(settings, spec, states, vocabulary=vocabulary, limits=limits, terms=terms)


@dataclass(frozen=True)
class Hosting:
    """All clients of a run, for an engine to host.

    Attributes:
        settings: Clients with their data.
        spec: Spec of the run.
        folder: Run folder; all machines of a cluster need to see it under one path.
        federation: Data and models, opened in this process.
        limits: Limits on received messages.
        stops: True if a step that fails ends the run.
        has_begun: True if the run was begun at an earlier start.
        noticed: Receives events in addition to the clients' answers: participant, event and reason.
    """

    settings: SiteSettings
    spec: RunSpec
    folder: Path
    federation: Population
    limits: Limits = field(default_factory=Limits)
    stops: bool = False
    has_begun: bool = False
    noticed: Callable[[str, str, str], None] = lambda participant, event, reason: None

    @property
    def states(self) -> Path:
        return self.folder / "checkpoints" / "clients"

    @property
    def portable(self) -> PortableSite:
        settings, limits = self.settings.model_dump_json(), self.limits.model_dump_json()
        return PortableSite(settings, limits, str(self.states), str(self.folder / "vocabulary"), self.stops)

    def here(self) -> Site:
        settings, spec, terms = self.settings, self.spec, SiteTerms(stops=self.stops)
        vocabulary, federation = self.folder / "vocabulary", self.federation
        return _site_class(spec).open(
            settings, spec, self.states, vocabulary=vocabulary, federation=federation, limits=self.limits, terms=terms
        )


def _site_class(spec: RunSpec) -> type[Site]:
    """Class of a simulated site; institutions open theirs without importing attackers."""
    if not spec.attackers:
        return Site
    from polyfed.engines.attackers import AttackingSite

    return AttackingSite


class EngineSettings(Settings):
    """Engine that executes client steps."""

    home: ClassVar[str] = "polyfed.engines"

    crosses_wire: ClassVar[bool] = False
    """True if client steps run in another program, which may fail as sites do, also where it is simulated."""

    @property
    def is_deployed(self) -> bool:
        return False

    def require(self) -> None:
        """Check that the engine is installed and its settings can be met here.

        Raises:
            ConfigError: a package or setting is missing; the message contains the remedy.
        """

    @abstractmethod
    def serve(self, hosting: Hosting, body: Callable[[Engine], _T]) -> _T:
        """Bring the engine up, run the server half ``body`` with it, and always take it down.

        Raises:
            Exception: any exception of ``body``.
        """
