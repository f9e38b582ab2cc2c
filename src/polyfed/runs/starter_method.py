"""A first method of a user's own: its class, an experiment, a study and tests, in a new folder."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.declarations import components
from polyfed.core.errors import ConfigError, RunError
from polyfed.runs.templates import template

_FILES = {"method.py": "{}.py", "experiment.yaml": "experiment.yaml", "study.yaml": "study.yaml"}
_FILES |= {"test_method.py": "test_{}.py"}
COMMANDS = {
    "pytest": "its tests",
    "PYTHONPATH=. polyfed run experiment.yaml": "one run",
    "PYTHONPATH=. polyfed study run study.yaml": "a table of it, FedAvg and FedProx",
}
"""Commands in the folder, each with its use."""
_FORM = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class StarterMethod:
    """Files of a method.

    Attributes:
        name: Name of the class.
        module: Name of its module, and of the folder.
    """

    name: str
    module: str

    @classmethod
    def of(cls, name: str) -> StarterMethod:
        """The method of a class ``Bounded``, in ``bounded.py``, or of a module ``my_method`` with its ``MyMethod``.

        Raises:
            ConfigError: the name is not of that form, or taken.
        """
        module = name.lower()
        if not _FORM.fullmatch(name) or keyword.iskeyword(module):
            raise ConfigError(f"init method {name}: needs the name of a class or module, such as Bounded or my_method")
        if module in components("polyfed.algorithms", ("polyfed.algorithms.algorithm", "Algorithm")):
            raise ConfigError(f"init method {name}: polyfed has a method '{module}'; choose another name")
        # in the folder a module comes before an installed one of its name, for all that imports it
        if module in sys.stdlib_module_names or getattr(importlib.util.find_spec(module), "origin", None):
            raise ConfigError(f"init method {name}: a module '{module}' is installed; choose another name")
        is_class = name[0].isupper() and "_" not in name
        return cls(name if is_class else "".join(part.capitalize() for part in module.split("_")), module)

    def write(self, parent: Path) -> list[Path]:
        """Write the folder; returns its files.

        Raises:
            RunError: the folder exists, or cannot be written; nothing is left then.
        """
        folder, temporary = parent / self.module, parent / f".{self.module}.{os.getpid()}.tmp"
        if folder.exists():
            raise RunError(f"'{folder}' exists; choose another name, or remove it")
        try:
            temporary.mkdir()
            for source, file in _FILES.items():
                text = template(f"method/{source}").render(method=self) + "\n"
                (temporary / file.format(self.module)).write_text(text, encoding="utf-8")
            temporary.rename(folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(f"cannot write '{folder}': {error.strerror}; run this in a folder of yours") from error
        return [folder / file.format(self.module) for file in _FILES.values()]
