"""Run folders that are broken or made to harm: every command that opens one ends with one line."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grids import mostly_slow
from run_folders import redigested

PAPERS = Path(__file__).parents[2] / "papers"
_NUMBER = re.compile(r"(?<=: )-?\d+(\.\d+)?(e-?\d+)?")
_TEXT = re.compile(r'(?<=: )"[^"]*"')
DAMAGES: dict[str, Callable[[str], str | bytes]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "deep": lambda text: "[" * 100_000,
    "a list": lambda text: "[1, 2]\n",
    "null": lambda text: "null\n",
    "binary": lambda text: b"\xff\xfe\x00\x01\n\n",
    "digits": lambda text: "9" * 6000 + "\n",
    "another object": lambda text: '{"a": {"b": [1]}}\n',
    "huge": lambda text: _NUMBER.sub("1e308", text),
    "beyond 64 bits": lambda text: _NUMBER.sub("9" * 400, text),
    "many": lambda text: _NUMBER.sub("1000000000000000", text),
    "negative": lambda text: _NUMBER.sub("-1", text),
    "NaN": lambda text: _NUMBER.sub("NaN", text),
    "lists for numbers": lambda text: _NUMBER.sub('[1, {"a": null}]', text),
    "numbers for texts": lambda text: _TEXT.sub("7", text),
    "nulls": lambda text: _NUMBER.sub("null", _TEXT.sub("null", text)),
}
OF_YAML: dict[str, Callable[[str], str | bytes]] = {
    "sections": lambda text: re.sub(r"^(\w+):$", r"\1: 5\nx_\1:", text, flags=re.MULTILINE),
    "lists for sections": lambda text: re.sub(r"^(\w+):$", r"\1: [a]\nx_\1:", text, flags=re.MULTILINE),
}
QUICK = {"cut"}
"""Fast, of the metrics: half of the text."""
OF_ALL = ("config.yaml", "run.json")
OF_RECORDS = (
    *("environment.json", "metrics.jsonl", "ledger.jsonl", "timing.jsonl", "partition.json"),
    *("history.jsonl", "progress.jsonl", "analysis/leakage.json"),
)
OF_MODELS = ("models/*/config.json", "models/*/vocabulary/*.json", "vocabulary/*.json", "checkpoints/*.json")
RECORDS = (
    "report RUN --out OUT/report.html",
    "compare RUN OTHER",
    f"analyse {PAPERS}/fedafd/weights.py:Weights RUN --out OUT",
    "analyse partition RUN --out OUT",
    "watch RUN",
)
BOTH = ("resume RUN", f"analyse {PAPERS}/fedcola/centres.py:Centres RUN --out OUT")
MODELS = ("evaluate RUN --data scenes", "gallery RUN --out OUT/gallery.html", "export RUN --out OUT/export")


def damaged(run: Path, pattern: str, damage: Callable[[str], str | bytes]) -> None:
    """The files, with the digest of the configuration made to fit."""
    for path in run.glob(pattern) if "*" in pattern else [run / pattern]:
        content = damage(path.read_text() if path.exists() else '{"tables": [{"title": "x", "rows": 3}]}')
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if pattern == "config.yaml":
        redigested(run)


def require_an_end(cli: Any, command: str, run: Path, other: Path, out: Path) -> None:
    """The command does its work, or prints one line of error."""
    out.mkdir(exist_ok=True)
    code, _, err = cli(*command.replace("RUN", str(run)).replace("OTHER", str(other)).replace("OUT", str(out)).split())
    errors = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert (code, len(errors)) in ((0, 0), (2, 1)), (command, code, err)


def cases() -> Iterator[Any]:
    """Each damage of each file, with the commands that read it."""
    every = (*RECORDS, *BOTH, *MODELS)
    for files, commands in ((OF_ALL, every), (OF_RECORDS, every[: -len(MODELS)]), (OF_MODELS, every[len(RECORDS) :])):
        for file in files:
            for name, damage in (DAMAGES | (OF_YAML if file.endswith(".yaml") else {})).items():
                is_fast = file == "metrics.jsonl" and name in QUICK
                marks = () if is_fast else pytest.mark.slow
                yield pytest.param(file, damage, commands, marks=marks, id=f"{file}-{name}")


@pytest.mark.parametrize(("pattern", "damage", "commands"), list(cases()))
def test_a_damaged_file_ends_in_one_line(
    tiny_run: Path, tmp_path: Path, cli: Any, pattern: str, damage: Any, commands: tuple[str, ...]
) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    damaged(run, pattern, damage)
    for number, command in enumerate(commands):
        copied = Path(shutil.copytree(run, tmp_path / "again")) if command.startswith("resume") else run
        require_an_end(cli, command, copied, tiny_run, tmp_path / f"out{number}")


PIPES = ["metrics.jsonl", ".lock", "models/best/config.json", "arrays/a/round-1.safetensors"]


@pytest.mark.parametrize("name", mostly_slow(PIPES, "models/best/config.json"))
def test_a_pipe_is_not_a_file(tiny_run: Path, tmp_path: Path, cli: Any, name: str) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for number, command in enumerate((*RECORDS, *BOTH, *MODELS[:2])):
        require_an_end(cli, command, run, tiny_run, tmp_path / f"out{number}")
        assert "is neither a file nor a folder" in cli("report", run)[2]
