"""Columns: figures that a study measures of a finished run."""

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
    """One figure of a run. A new column is a class in ``polyfed.lab.studies.columns``, or any importable one."""

    home: ClassVar[str] = "polyfed.lab.studies.columns"
    is_outcome: ClassVar[bool] = True
    """True for a result of training; costs and facts of the data are not compared row by row."""

    lower: bool = Field(default=False, description="whether lower values are better")
    digits: int = Field(default=2, ge=0, le=9, description="decimals shown")
    effect: float = Field(
        default=1.0,
        ge=0,
        description="the smallest difference that matters, in the column's unit; an interval within it means no "
        "difference",
    )
    once: bool = Field(default=False, description="measured with the first seed alone, as all seeds give the same")

    @property
    def decimals(self) -> int:
        """Decimals of a difference between two figures, which may be means of whole numbers."""
        return max(2, self.digits)

    @abstractmethod
    def measure(self, run: Run) -> float:
        """Measure the figure; NaN if the run lacks it.

        Raises:
            PolyfedError: The run cannot have it, such as a metric that was not measured.
        """

    def require(self, experiment: Experiment) -> None:
        """Raise ConfigError if no run of an experiment can have the figure, as far as that is known beforehand."""

    @property
    def needs_models(self) -> bool:
        """True if it reads models or clients' states, which a cell deletes as soon as possible."""
        return False

    def is_at_hand(self, folder: Path) -> bool:
        """True if it can be measured in the folder of a complete cell without models."""
        return not self.needs_models

    def changed(self, changes: Mapping[str, Any], where: str) -> Self:
        """The column with other settings.

        Raises:
            ConfigError: Settings are wrong; the message begins with ``where``.
        """
        try:
            return parse_settings(type(self), {**self.model_dump(mode="json"), **changes}) if changes else self
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    @property
    def digest(self) -> str:
        """Identity of the figure in a cell: all settings except display, verdicts and seeds, and own code."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def identity(self) -> dict[str, Any]:
        """Content of the digest."""
        content = {name: value for name, value in self.model_dump(mode="json").items() if name not in _SHOWN}
        return content | own_code(self)


def named_column(value: Any) -> Any:
    """A column's settings; a mapping without a name is a metric, a text the name of one."""
    if isinstance(value, str):
        return {"name": "metric", "metric": value}
    return {"name": "metric", **value} if isinstance(value, Mapping) and "name" not in value else value
