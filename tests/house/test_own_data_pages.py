"""Pages on data of one's own: from the first block to the last, on generated data, to a figure above chance."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polyfed.runs.experiment import Experiment
from polyfed.runs.records import RunRecords

DOCS = Path(__file__).parents[2] / "docs"
QUICK = "--set run.threads=1 --set run.output.plots=true"


def followed(page: str, cli: Callable[..., tuple[int, str, str]], *, trains: bool = True) -> str:
    """Runs all blocks of a page, or all that train nothing; returns what the commands print."""
    text, printed = (DOCS / f"{page}.md").read_text(encoding="utf-8"), ""
    if not trains:
        text = re.sub(r"^polyfed (compare|export) .*\n|^polyfed run [\w.]+\n", "", text, flags=re.M)
        text = re.sub(r"^polyfed run (?!.*--dry-run).*", r"\g<0> --dry-run", text, flags=re.M)
        text = text.replace("train=1500", "train=40")
    for language, block in re.findall(r"^```(python|bash)\n(.*?)^```\n", text, re.M | re.S):
        if language == "python":
            with contextlib.redirect_stderr(io.StringIO()):  # progress of data sets that are saved
                exec(block, {})
            continue
        for command in block.splitlines():
            code, out, err = cli(*shlex.split(f"{command} {QUICK if ' run ' in command else ''}")[1:])
            assert (code, err) == (0, ""), command
            printed += out
    return printed


def test_a_page_on_tables_ends_above_chance(cli: Callable[..., tuple[int, str, str]]) -> None:
    out = followed("how-to/tables", cli)
    assert "patient (not used: it numbers the rows): " in out
    assert "warning: 0" not in out
    (low, chance), *_ = re.findall(r"95 % interval ([\d.]+) to .* chance \(([\d.]+) %\)", " ".join(out.split()))
    assert float(low) > float(chance) + 10


def test_a_page_on_captions_reads_both_layouts_and_names_their_language(
    cli: Callable[..., tuple[int, str, str]],
) -> None:
    pytest.importorskip("datasets", reason="the extra hub is not installed")
    out = " ".join(followed("how-to/captions", cli).split())
    assert out.count("texts seem to be German: their tokens are made from scratch") == 2
    assert out.count("nothing was written; the same command without --dry-run runs it") == 2
    for name, source in {"fotos": "folder", "saved": "arrow"}.items():
        assert Experiment.load(f"{name}.yaml").data.sources["pairs"].component_name() == source


@pytest.mark.parametrize("page", ["how-to/masks", "how-to/sounds", "tutorials/own-data"])
def test_a_page_leads_to_an_experiment_that_is_ready(page: str, cli: Callable[..., tuple[int, str, str]]) -> None:
    pytest.importorskip("scipy", reason="the extra sounds is not installed")
    assert "the same command without --dry-run runs it" in followed(page, cli, trains=False)


def test_a_method_is_written_with_files_that_run_as_its_page_shows(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "tutorials" / "own-method.md").read_text(encoding="utf-8")
    monkeypatch.setitem(sys.modules, "bounded", None)  # that of this test is gone after it
    del sys.modules["bounded"]
    ends = {"run": f"--rounds 1 --set data.sources.scenes.train=60 {QUICK}", "study": "--scale smoke --only bounded"}
    printed = ""
    for command in re.findall(r"^```bash\n(.*?)^```\n", page, re.M | re.S)[0].splitlines():
        words = shlex.split(command.removeprefix("PYTHONPATH=. "))
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            monkeypatch.setenv("PYTHONPATH", ".")  # of the study's processes
            monkeypatch.syspath_prepend(str(Path.cwd()))
        elif words[0] == "pytest":
            for name, test in runpy.run_path("test_bounded.py").items():
                if name.startswith("test_"):
                    test(*[tmp_path / name] * ("tmp_path" in inspect.signature(test).parameters))
        else:
            code, out, err = cli(*words[1:], *shlex.split(ends.get(words[1], "")))
            assert (code, err if words[1] != "study" else "") == (0, ""), command
            printed += out
    assert "  PYTHONPATH=. polyfed study run study.yaml  " in printed
    assert Path("bounded.py").read_text() == (DOCS / "examples" / "bounded.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "primary", "inside"),
    [("sounds", "accuracy", "data:audio/wav;base64,"), ("masks", "dice", ">predicted, Dice ")],
)
def test_a_page_runs_and_its_model_is_above_chance(
    page: str, primary: str, inside: str, cli: Callable[..., tuple[int, str, str]]
) -> None:
    out = followed(f"how-to/{page}", cli)
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
