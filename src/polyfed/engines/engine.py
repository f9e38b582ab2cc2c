"""Engines as settings: how a run chooses where client steps execute."""

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
    """All clients of a run as another process on this machine or cluster opens them: text, so that it travels.

    Attributes:
        settings, limits: JSON of the clients with their data, and of the limits on what is received.
        states, vocabulary: folders of what clients keep, and of what is learnt from the public set.
        stops: whether a step that fails ends the run.
    """

    settings: str
    limits: str
    states: str
    vocabulary: str
    stops: bool = False

    def open(self, spec: RunSpec) -> Site:
        """The site, in this process, which from now on computes with as many threads as the run has."""
        settings = SiteSettings.model_validate_json(self.settings)
        torch.set_num_threads(settings.run.threads)
        limits = Limits.model_validate_json(self.limits)
        folders, terms = (Path(self.states), Path(self.vocabulary)), SiteTerms(stops=self.stops)
        return _kind_of(spec).open(settings, spec, folders[0], vocabulary=folders[1], limits=limits, terms=terms)


@dataclass(frozen=True)
class Hosting:
    """What an engine hosts: all clients of a run.

    Attributes:
        settings: the clients with their data.
        spec: the run.
        folder: the run folder; a cluster needs to see it under one path on all machines.
        federation: data and models, opened in this process.
        limits: on what is received.
        stops: whether a step that fails ends the run.
        has_begun: whether the run was begun at an earlier start.
        noticed: told of what happens beside the clients' answers: to whom, the event, and the reason.
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
        return _kind_of(self.spec).open(
            self.settings,
            self.spec,
            self.states,
            vocabulary=self.folder / "vocabulary",
            federation=self.federation,
            limits=self.limits,
            terms=SiteTerms(stops=self.stops),
        )


def _kind_of(spec: RunSpec) -> type[Site]:
    """A simulated site, of attackers where the run has some; institutions, which open theirs, import none of them."""
    if not spec.attackers:
        return Site
    from polyfed.engines.attackers import AttackingSite

    return AttackingSite


class EngineSettings(Settings):
    """Where client steps execute."""

    home: ClassVar[str] = "polyfed.engines"

    crosses_wire: ClassVar[bool] = False
    """Whether client steps are another program's, which may fail as sites do, also where it is simulated here."""

    @property
    def is_deployed(self) -> bool:
        return False

    def require(self) -> None:
        """Check that the engine is installed and its settings can be met here.

        Raises:
            ConfigError: what is missing, and how to get it.
        """

    @abstractmethod
    def serve(self, hosting: Hosting, body: Callable[[Engine], _T]) -> _T:
        """Bring the engine up, run the server half ``body`` with it, and take it down, whatever happens.

        Raises:
            Exception: whatever ``body`` raises.
        """
