"""How long clients take for a step, and when they are awake: virtual seconds, for simulations."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator

from polyfed.core.effects import require_default
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings, parse_settings
from polyfed.core.untrusted import file_json
from polyfed.federation.client import ClientInfo


class ClientTimes(Settings):
    """When one client works; after ``period`` its hours repeat."""

    seconds: float = Field(gt=0, allow_inf_nan=False, description="that a step takes it")
    period: float = Field(default=24.0, gt=0, allow_inf_nan=False, description="after which its hours repeat")
    awake: tuple[tuple[float, float], ...] | None = Field(
        default=None,
        min_length=1,
        description="[from, until] of each period in which it begins steps, which it then ends; null: always",
    )

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.awake is None:
            require_default(self, "without awake", "period")
        times = [value for interval in self.awake or () for value in interval]
        if times != sorted(set(times)) or (times and not 0 <= times[0] <= times[-1] <= self.period):
            raise ValueError(f"awake {self.awake} is not ascending within 0 and period {self.period:g}")
        return self

    def begins(self, asked: float) -> float:
        """When it begins a step for which it is asked at that time."""
        if self.awake is None:
            return asked
        start = self.period * math.floor(asked / self.period)
        for first, last in self.awake:
            if asked < start + last:
                return max(asked, start + first)
        return start + self.period + self.awake[0][0]


class Times(Settings):
    """When the clients of a simulation work, so that replies have an order that no machine's speed decides."""

    home: ClassVar[str] = "polyfed.federation.times"

    @abstractmethod
    def of(self, clients: Sequence[ClientInfo], seed: int) -> Mapping[str, ClientTimes]:
        """Client -> its times.

        Raises:
            ConfigError: they do not fit these clients.
        """


class Drawn(Times):
    """Speeds and hours drawn from the run's seed: the log of a step's time is uniform, from the fastest to ``skew``
    times as long."""

    short_name: ClassVar[str] = "drawn"

    seconds: float = Field(default=1.0, gt=0, description="virtual seconds of a step of the fastest")
    skew: float = Field(default=1.0, ge=1, description="times as long that a step of the slowest may take")
    groups: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="group -> times as long as drawn that its clients take; 1 for those not named"
    )
    awake: float = Field(default=1.0, gt=0, le=1, description="share of each period in which a client begins steps")
    period: float = Field(default=24.0, gt=0, description="virtual seconds after which a client's hours repeat")

    @model_validator(mode="after")
    def _hours(self) -> Self:
        if self.awake == 1:
            require_default(self, "with awake: 1", "period")
        return self

    def of(self, clients: Sequence[ClientInfo], seed: int) -> Mapping[str, ClientTimes]:
        groups = {client.group for client in clients}
        for name in self.groups.keys() - groups:
            raise ConfigError(f"run.pace.clients.groups: no clients are called '{name}'; {nearest(name, groups)}")
        return {client.id: self._of(client, seed) for client in clients}

    def _of(self, client: ClientInfo, seed: int) -> ClientTimes:
        # by client, so that another one more or less changes nobody's
        speed, shift = torch.rand(2, generator=generator(seed, client.id, "times"), dtype=torch.float64).tolist()
        seconds = self.seconds * self.groups.get(client.group, 1.0) * self.skew**speed
        if self.awake == 1:
            return ClientTimes(seconds=seconds)
        first = shift * self.period
        last = first + self.awake * self.period
        if last <= self.period:
            return ClientTimes(seconds=seconds, period=self.period, awake=((first, last),))
        awake = (0.0, last - self.period), (first, self.period)
        return ClientTimes(seconds=seconds, period=self.period, awake=awake)


class Trace(Times):
    """Times from a JSON file: client -> ``seconds`` and, for one that sleeps, ``period`` and ``awake``."""

    short_name: ClassVar[str] = "trace"

    path: Path = Field(description="of the file")

    def of(self, clients: Sequence[ClientInfo], seed: int) -> Mapping[str, ClientTimes]:
        where = f"run.pace.clients.path: '{self.path}'"
        try:
            content = file_json(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where} cannot be read: {error}") from error
        if not isinstance(content, Mapping):
            raise ConfigError(f'{where} must be a mapping, client -> times, such as {{"image-0": {{"seconds": 3}}}}')
        if missing := [one.id for one in clients if one.id not in content]:
            raise ConfigError(f"{where} has no times of client '{missing[0]}'")
        try:
            return {client.id: parse_settings(ClientTimes, content[client.id]) for client in clients}
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
