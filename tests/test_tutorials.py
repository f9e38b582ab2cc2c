"""Tutorials: every command and script of the page runs in its order, on less data."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]
OWN_DATA = (Path(__file__).parents[1] / "docs" / "tutorials" / "own-data.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.S)


@pytest.mark.slow
def test_own_data_from_a_folder_to_a_model(cli: Cli) -> None:
    tutorial, layouts = OWN_DATA.split("## Layouts of folders")
    (script,) = blocks(tutorial, "python")
    assert "train=1500" in script
    exec(compile(script.replace("train=1500", "train=40"), "make_photos.py", "exec"), {})
    commands = [line for block in blocks(tutorial, "bash") for line in block.splitlines()]
    assert len(commands) <= 15
    said = []
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "polyfed"
        less = [
            "--set",
            "run.rounds=1",
            "--set",
            "algorithm.warmup_rounds=0",
            "--set",
            "run.plots=false",
            "--set",
            "run.threads=1",
        ]
        code, out, err = cli(*words, *(less if words[0] == "run" else ()))
        assert code == 0, f"{command}: {err}"
        assert not err or "is that of round 0" in err  # on so few pictures nobody learns
        said.append(out)
    report = json.loads(Path("data/photos/report.json").read_text())
    assert report["items"] == {"test": 4, "validation": 4, "train": 32}
    assert "nothing was written" in said[3]
    assert Path("shop-model/README.md").is_file()
    assert "yaml" in layouts
