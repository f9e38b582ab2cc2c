"""Analyses of finished runs and of experiments, each a class of settings with a name.

``polyfed analyse`` runs them, and so do columns of studies (``{name: analysis, analysis: cost, figure: ...}``). An
analysis of your own is a class in a Python file, named as ``FILE.py:Class``.
"""

from __future__ import annotations

import json
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from polyfed.core.declarations import class_in_file, is_file_class
from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.core.files import write_atomically
from polyfed.core.settings import Settings, parse_settings
from polyfed.runs.opened import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyfed.reporting.tables import TextTable
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.opened import ServerModel

FOLDER = "analysis"
"""Subfolder of a run for results of analyses."""

_FILE_NAME = re.compile(r"[\w.,=-]{0,120}", re.ASCII)

ModelName = Annotated[str, Field(description="the server's final model (last), its best, or that of a round")]


@dataclass(frozen=True)
class AnalysisResult:
    """Result of an analysis.

    Attributes:
        figures: All figures by name, as in the JSON file and for columns of studies.
        tables: Tables for the terminal.
        draw: Draws the result, once the tables are shown; None without a drawing.
    """

    figures: dict[str, Any]
    tables: Sequence[TextTable]
    draw: Callable[[], Figure] | None = None

    def save(self, folder: Path, name: str, **more: object) -> list[Path]:
        """Write ``<name>.json`` (with ``more``), and ``<name>.png`` if there is a drawing.

        NaN and infinity, which JSON lacks, become null.

        Raises:
            RunError: The folder cannot be written to.
        """
        from polyfed.reporting.figures import save

        paths = [folder / f"{name}.json"]
        finite = json.loads(json.dumps({**self.figures, **more}, default=dict), parse_constant=lambda name: None)
        try:
            write_atomically(paths[0], f"{json.dumps(finite, indent=1, ensure_ascii=False)}\n".encode())
            if self.draw is not None:
                paths.append(save(self.draw(), folder / f"{name}.png"))
        except OSError as error:
            raise RunError(f"cannot write to '{folder}' ({error.strerror or error}); choose another --out") from error
        return paths


class Analysis(Settings):
    """An analysis with its settings, a class in ``polyfed.lab.analysis`` or in a file of your own."""

    home: ClassVar[str] = "polyfed.lab.analysis"
    is_reported: ClassVar[bool] = False
    """True if the run's own reports show the result, so that its files have one name."""

    @abstractmethod
    def answer(self, run: Run) -> AnalysisResult:
        """Analyse a run.

        Raises:
            PolyfedError: The run lacks the subject of the analysis.
        """

    def answer_experiment(self, experiment: Experiment) -> AnalysisResult:
        """Analyse an experiment before it is run, if the analysis supports that."""
        raise NotImplementedError

    @classmethod
    def takes_experiments(cls) -> bool:
        return cls.answer_experiment is not Analysis.answer_experiment

    @classmethod
    def title(cls) -> str:
        """Name of the analysis and of its files."""
        return cls.__name__.lower()

    @property
    def stem(self) -> str:
        """Name of its files, with all settings that differ from the defaults.

        Settings that are too long for a file name, or have other characters, are replaced by a digest.
        """
        fields = {} if self.is_reported else type(self).model_fields
        values = {name: getattr(self, name) for name in fields if getattr(self, name) != fields[name].default}
        texts = {name: ",".join(map(str, it)) if isinstance(it, list) else str(it) for name, it in values.items()}
        given = "-".join(f"{name}{text}" for name, text in texts.items())
        if not _FILE_NAME.fullmatch(given):
            given = sha256(given.encode()).hexdigest()[:12]
        return f"{self.title()}-{given}" if given else self.title()


def analysis_class(name: str) -> type[Analysis]:
    """The analysis of that name, or the class in a file, ``FILE.py:Class``.

    Raises:
        ConfigError: The analysis is unknown.
    """
    if is_file_class(name):
        with _importing_from_above(Path(name).resolve()):
            return class_in_file(name, Analysis)  # type: ignore[type-abstract]
    if name not in (known := Analysis.declared()):
        hint = f"{nearest(name, known)}; those of a paper are files next to its studies, FILE.py:Class"
        raise ConfigError(f"no analysis '{name}'; {hint}")
    return Analysis.named(name)  # type: ignore[return-value]


@contextmanager
def _importing_from_above(file: Path) -> Iterator[None]:
    """Lets a file import by name from its own folder and the two above it: ``papers/creamfl/drift.py`` its clone."""
    before = sys.path.copy()
    sys.path += map(str, file.parents[:3])
    try:
        yield
    finally:
        sys.path[:] = before


def with_settings(analysis: type[Analysis], settings: Mapping[str, Any]) -> Analysis:
    """The analysis with its settings.

    Raises:
        ConfigError: A setting is unknown or wrong.
    """
    try:
        return parse_settings(analysis, settings)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("config: ")) from error


def server_model(run: Run, which: str) -> ServerModel:
    """The server's model; warns if the method does not train it."""
    server = run.server_model(which)
    server.warn_if_untrained()
    return server


def ready_folder(path: Path) -> Path:
    """The folder, created if it is missing: called before the work whose result goes there.

    Raises:
        RunError: The folder cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create folder '{path}' ({error.strerror or error}); choose another --out") from error
    return path


def json_value(content: Any, path: str) -> float:
    """The number at a dotted path in the figures of an analysis.

    Raises:
        ConfigError: The path does not lead to a number.
    """
    for key in path.split("."):
        known = {str(at): item for at, item in enumerate(content)} if isinstance(content, list | tuple) else content
        if not isinstance(known, Mapping) or key not in known:
            names = known if isinstance(known, Mapping) else ()
            raise ConfigError(f"figure {path}: unknown '{key}'; {nearest(key, map(str, names))}")
        content = known[key]
    if isinstance(content, bool) or not isinstance(content, int | float):
        raise ConfigError(f"figure {path}: is not a number")
    return float(content)
