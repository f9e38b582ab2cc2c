"""Pages on data of one's own: from the first block to the last, on what they generate, to a figure above chance."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from polyfed.runs.records import RunRecords

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
QUICK = "--set run.threads=1 --set run.output.plots=true"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "primary", "inside"),
    [("sounds", "accuracy", "data:audio/wav;base64,"), ("masks", "dice", ">predicted, Dice ")],
)
def test_a_page_runs_and_what_it_trains_is_above_chance(
    page: str, primary: str, inside: str, cli: Callable[..., tuple[int, str, str]]
) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(python|bash)\n(.*?)^```\n", text, re.M | re.S):
        if language == "python":
            exec(block, {})
            continue
        for command in block.splitlines():
            code, out, err = cli(*shlex.split(f"{command} {QUICK if ' run ' in command else ''}")[1:])
            assert (code, err) == (0, ""), command
    (low, chance), *_ = re.findall(r"95 % interval ([\d.]+) to .* chance \(([\d.]+) %\)", " ".join(out.split()))
    assert float(low) > float(chance) + 10
    (folder,) = Path("runs").iterdir()
    judged = json.loads(cli("evaluate", folder, "--data", page, "--json")[1])
    assert judged["metrics"][primary] == RunRecords.load(folder).series("server", primary)[judged["round"]]
    shown = (folder / "report.html").read_text()
    assert inside in shown
    assert "Local data. " in shown
    assert cli("report", folder)[0] == 0
    assert inside not in (folder / "report.html").read_text()
