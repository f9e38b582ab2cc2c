"""Commands of the documentation: each parses, and each runs on less data, here or in a test that a table names.

Pages on data of one's own are followed from their first block in ``test_own_data_pages.py``, complete tutorials in
``test_tutorials.py``, both with their output.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

import which_method
from paper_studies import STUDIES
from polyfed.cli.console import prepared
from polyfed.cli.main import app
from polyfed.runs.config_files import preset_names, read_config
from polyfed.runs.experiment import Experiment

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
OPTIONS = {"--seed": "run.seed=", "--rounds": "run.rounds=", "--engine": "run.engine.name=", "--twin": "twin.kind="}
OPTIONS["--set"] = ""
ON_RUNS = ("report", "resume", "watch", "compare", "evaluate", "export", "gallery", "downstream", "analyse")
ELSEWHERE = {
    ".*--(data|weights)-dir": "data sets or networks that no installation has; a preset is loaded below",
    "deploy |run (consortium|federation|wards)": "a server and sites: tests/deploy/test_guide.py does their pages",
    "init|prepare|run (cells|experiment|fotos|patients|saved|shop|sounds).yaml": "of a page: test_own_data_pages.py",
    "demo": "half a minute: test_wheel.py; on less: test_cli.py",
    "run runs/": "a twin or another seed of a run that is there: test_cli.py, test_twins.py",
    "run .*--(sweep|from)|resume .*--rounds": "studies, and runs that build on others: test_sweep.py, test_carried.py",
    "run .*--(engine|device)": "Ray, Flower or a GPU; loaded below",
    "analyse .*(NAME|Drift)": "a name of one's own; an analysis of a paper: tests/papers",
    "export .*huggingface": "encoders of transformers, or ten seconds: tests/export",
    "study (run|show|export)": "hours; that their files are there is tested below",
    "--install-completion": "writes into the shell's own files",
}
"""Commands that no test here runs, with the reason; the first pattern that matches counts."""


class Command(NamedTuple):
    """A command of a page: its place, and its words after ``polyfed``."""

    place: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def settings(self) -> list[str]:
        """Its overrides, those of short options too."""
        pairs = ((OPTIONS.get(option), value) for option, value in pairwise(self.words))
        return [f"{key}{value}" for key, value in pairs if key is not None]


def commands() -> Iterator[Command]:
    """Each ``polyfed ...`` in fenced and indented code, without what the shell does with its output."""
    for page in PAGES:
        language = None
        for number, line in enumerate(page.read_text(encoding="utf-8").replace("\\\n", "  ").splitlines(), 1):
            if line.lstrip().startswith("```"):
                language = line.strip()[3:] if language is None else None
                continue
            code = line if language in ("bash", "console") or (language is None and line.startswith("    ")) else ""
            if match := re.search(r"(?:^|\s)polyfed ([a-z-].*)", code):
                words = shlex.split(re.split(r"[;|>]| && ", match[1])[0], comments=True)
                yield Command(f"{page.name}:{number}", tuple(words))


COMMANDS = tuple(commands())


def reason(command: Command) -> str:
    return next((pattern for pattern in ELSEWHERE if re.match(pattern, command.text)), "")


def chosen(*names: str) -> list[Any]:
    """Commands of these names that run here, each text once."""
    here = {command.text: command for command in COMMANDS if command.words[0] in names and not reason(command)}
    return [pytest.param(command, id=text) for text, command in here.items()]


def less(preset: str) -> Iterator[str]:
    """Overrides that leave a few items of the generated sources of a preset, small batches, and one thread."""
    yield "run.threads=1"
    content = read_config(preset)
    for name, source in content["data"]["sources"].items():
        sizes = {"train": 60, "validation": 8, "test": 8}
        yield from (f"data.sources.{name}.{split}={size}" for split, size in sizes.items() if split in source)
    for name, group in content["clients"].items():
        yield f"clients.{name}.training.batch_size=4"
        yield from [f"clients.{name}.items=20"] if group.get("items") else ()
    yield from ["server.training.batch_size=4"] if "training" in content["server"] else ()
    yield from ["public.items=16"] if content.get("public") else ()


def built() -> list[Any]:
    """Commands that run a preset on generated data; one of those that differ in numbers alone."""
    commands_of: dict[tuple[str, ...], Any] = {}
    for param in chosen("run"):
        (command,) = param.values
        choices = (each for each in command.settings if not re.fullmatch(r"[\w.]+=[\d.]+", each))
        commands_of.setdefault((command.words[1], *choices), param)
    return list(commands_of.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the examples of the documentation."""
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "work", dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(str(tmp_path / "work"))
    return tmp_path / "work"


NOTES = ("the best model by validation", "of the component before are dropped", "tokens cut off")


def odd(err: str) -> list[str]:
    """Lines of stderr without the notes of small runs and replaced components."""
    return [line for line in err.splitlines() if not any(words in line for words in NOTES)]


def test_the_commands_of_all_pages_are_read() -> None:
    pages = {command.place.partition(":")[0] for command in COMMANDS}
    assert {"README.md", "compare-runs.md", "ten-minutes.md", "own-method.md", "fedcola.md", "vqa.md"} <= pages
    assert len(COMMANDS) > 130


def test_each_command_runs_here_or_in_a_named_test() -> None:
    here = ("run", "list", "doctor", "study", *ON_RUNS)
    assert [command for command in COMMANDS if command.words[0] not in here and not reason(command)] == []
    assert {reason(command) for command in COMMANDS} - {""} == ELSEWHERE.keys()


def test_each_command_parses(folder: Path) -> None:
    def without_work(command: Any) -> Any:
        for below in getattr(command, "commands", {}).values():
            without_work(below)
        command.callback = None
        return command

    polyfed = without_work(prepared(typer.main.get_command(app)))
    for command in COMMANDS:
        for option, value in pairwise(command.words):
            if option.endswith("-dir"):
                Path(value).mkdir(exist_ok=True)
        if "completion" not in command.text:
            polyfed(list(command.words), standalone_mode=False)


@pytest.mark.parametrize("command", chosen("list", "doctor"))
def test_a_listing_command_runs(cli: Any, command: Command) -> None:
    assert cli(*command.words)[::2] == (0, "")


@pytest.mark.parametrize("command", built())
def test_a_run_of_a_page_on_generated_data_is_built(cli: Any, folder: Path, command: Command) -> None:
    _, preset, *words = command.words
    small = [word for setting in less(preset) for word in ("--set", setting)]
    code, out, err = cli("run", preset, *small, *words, "--dry-run")
    assert (code, odd(err)) == (0, []), err
    assert "nothing was written" in out


@pytest.mark.parametrize("command", chosen(*ON_RUNS))
def test_a_command_on_a_run_works(cli: Any, folder: Path, tiny_run: Path, command: Command) -> None:
    words = [word.replace("*", "0") for word in command.words]
    for run in {word for word in words if word.startswith("runs/")}:
        shutil.copytree(tiny_run, run)
    code, _, err = cli(*words)
    assert (code, odd(err)) == (0, [])


@pytest.mark.parametrize(
    ("place", "preset", "settings"),
    [
        (command.place, command.words[1], command.settings)
        for command in COMMANDS
        if command.words[0] == "run" and command.words[1] in preset_names()
    ],
)
def test_a_run_of_a_page_loads(folder: Path, place: str, preset: str, settings: list[str]) -> None:
    Experiment.load(preset, settings)


def test_every_command_that_which_method_may_show_loads() -> None:
    for text in {leaf.command(row) for leaf in which_method.leaves() for row in leaf.rows()}:
        command = Command("", (*shlex.split(text)[1:],))
        assert Experiment.load(command.words[1], command.settings).plan, text


def test_the_studies_of_pages_exist() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = {*re.findall(r"polyfed study run papers/([a-z0-9/-]+)\.yaml", text)}
    assert {"polyfed/demo", "fedaid/t1"} <= named
    assert named <= STUDIES.keys()


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_loads(file: Path) -> None:
    Experiment.load(str(file))
