"""Columns: what a study measures of a finished run."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from polyfed.core.declarations import own_code
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings, parse_settings
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run

_SHOWN = ("lower", "digits", "effect", "once")


class ColumnSettings(Settings):
    """One figure of a run. A new kind is a class in ``polyfed.lab.studies.columns``, or any importable one."""

    home: ClassVar[str] = "polyfed.lab.studies.columns"
    is_outcome: ClassVar[bool] = True
    """Whether it tells what training has come to; costs and facts of the data are not compared row by row."""

    lower: bool = Field(default=False, description="whether lower values are better")
    digits: int = Field(default=2, ge=0, le=9, description="decimals shown")
    effect: float = Field(
        default=1.0,
        ge=0,
        description="the smallest difference that matters, in the column's unit: where all of an interval is within "
        "it, there is no difference",
    )
    once: bool = Field(default=False, description="measured with the first seed alone: no seed changes it")

    @property
    def decimals(self) -> int:
        """Decimals of a difference between two figures, which may be means of whole numbers."""
        return max(2, self.digits)

    @abstractmethod
    def measure(self, run: Run) -> float:
        """The figure; NaN where the run has none.

        Raises:
            PolyfedError: the run cannot have it, such as a metric that nobody was measured in.
        """

    def require(self, experiment: Experiment) -> None:
        """Raise ConfigError if no run of an experiment can have it, as far as that is known beforehand."""

    @property
    def needs_models(self) -> bool:
        """Whether it reads models or clients' states, which a cell keeps no longer than it must."""
        return False

    def is_at_hand(self, folder: Path) -> bool:
        """Whether it can be measured in the folder of a complete cell without models."""
        return not self.needs_models

    def changed(self, changes: Mapping[str, Any], where: str) -> Self:
        """With other settings.

        Raises:
            ConfigError: it cannot have them; the message begins with ``where`` they stand.
        """
        try:
            return parse_settings(type(self), {**self.model_dump(mode="json"), **changes}) if changes else self
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    @property
    def digest(self) -> str:
        """Identity of the figure in a cell: all settings but those of display, verdicts and seeds, and own code."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def identity(self) -> dict[str, Any]:
        """Content of the digest."""
        content = {name: value for name, value in self.model_dump(mode="json").items() if name not in _SHOWN}
        return content | own_code(self)


def named_column(value: Any) -> Any:
    """A column's settings: a bare mapping is a metric, a bare text the name of one."""
    if isinstance(value, str):
        return {"name": "metric", "metric": value}
    return {"name": "metric", **value} if isinstance(value, Mapping) and "name" not in value else value
