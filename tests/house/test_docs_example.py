"""The documentation is true: its method runs, learns and resumes as shown, and named files and settings exist."""

from __future__ import annotations

import ast
import re
import runpy
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch import Tensor

import reference
from polyfed import Experiment, open_run, resume, run
from polyfed.algorithms.creamfl import CreamFL
from polyfed.core.settings import Settings, is_component
from polyfed.federation.settings import GroupSettings
from polyfed.optim.settings import OptimizerSettings
from polyfed.runs.config_files import preset_names
from polyfed.runs.twins import TwinSettings
from sessions import first_cohort, prepared, woken

DOCS = Path(__file__).resolve().parents[2] / "docs"
METHOD = {"name": "consensus.Consensus", "digest": {"epochs": 3}}
FILES = ("metrics.jsonl", "ledger.jsonl", "models/last/model.safetensors")


@pytest.fixture
def experiment(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    return tiny | {"algorithm": METHOD, "run": tiny["run"] | {"output": {"plots": False}}}


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return reference.pages()


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def encoded(experiment: dict[str, Any], folder: Path) -> dict[str, bytes]:
    """Files of a run with encoded messages."""
    content = experiment | {"run": experiment["run"] | {"engine": {"name": "local", "serialize": True}}}
    return contents(run(Experiment.load(content), folder / "encoded").folder)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


SHOWN = {"consensus.py": "tutorials/own-method.md", "bounded.py": "tutorials/own-method.md"}
SHOWN["own_parts.py"] = "how-to/use-pretrained-encoders.md"


@pytest.mark.parametrize(("file", "page"), SHOWN.items())
def test_the_page_shows_the_complete_file(file: str, page: str) -> None:
    assert (DOCS / "examples" / file).read_text(encoding="utf-8") in blocks(page, "python")


@pytest.mark.parametrize(("file", "lines", "names"), [("bounded.py", 30, 8), ("consensus.py", 40, 16)])
def test_a_method_of_ones_own_is_short(file: str, lines: int, names: int) -> None:
    text = (DOCS / "examples" / file).read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = {line for one in documented for line in range(one.body[0].lineno, one.body[0].end_lineno + 1)}
    lines_of_code = ((number, line) for number, line in enumerate(text.splitlines(), 1) if number not in docstrings)
    code = [line for _, line in lines_of_code if line.strip() and not line.lstrip().startswith("#")]
    imported = [name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for name in node.names]
    assert len(code) <= lines
    assert len(imported) <= names


def test_a_module_and_a_data_set_class_of_ones_own_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(DOCS / "examples" / "own_parts.py"))
    assert open_run("runs/discs").metrics("shops-1")["accuracy"] > 90


def test_the_imports_of_the_page_work() -> None:
    place = "explanation/how-a-method-works.md"
    page = (DOCS / place).read_text(encoding="utf-8")
    block = next(text for text in blocks(place, "python") if text.startswith("from polyfed.algorithms"))
    names: dict[str, Any] = {}
    exec(block, names)
    assert all(name in names and f"`{name}" in page for name in ("each", "PayloadError", "client_query"))


def test_a_dotted_name_is_all_that_a_method_needs_and_it_resumes_in_the_same_bits(
    experiment: dict[str, Any], tmp_path: Path
) -> None:
    plain = run(Experiment.load(experiment), tmp_path / "plain")
    assert plain.records.config["algorithm"]["digest"] == {"epochs": 3, "loss": "l1", "batch_size": 128}
    assert {line.step for line in plain.records.transfers} == {"fit", "evaluate:assess"}
    assert not plain.records.excluded()
    expected = contents(plain.folder)
    assert encoded(experiment, tmp_path) == expected
    for file in (plain.folder / "checkpoints").glob("round-000002.*"):
        file.unlink()
    assert contents(resume(plain.folder).folder) == expected


def test_the_server_nears_the_mean_of_the_clients_representations(experiment: dict[str, Any], tmp_path: Path) -> None:
    experiment["algorithm"] = METHOD | {"distiller": {"epochs": 20}}
    experiment["server"]["training"] = {"optimizer": {"kind": "adam", "lr": 0.01}, "batch_size": 16}
    session = prepared(experiment, tmp_path)
    server, infos = session.server, session.server.clients
    before = dict(server.represent_public())
    session.experiment.algorithm.round(server, first_cohort(session))
    clients = [woken(session, info.id, (2, 0), after=(1, 0)) for info in infos]
    sent = [client.represent(client.public_set) for client in clients]
    for modality, now in server.represent_public().items():
        mean = torch.stack([values[modality] for values in sent if modality in values]).mean(0)
        assert (now - mean).norm(dim=1).mean() < 0.9 * (before[modality] - mean).norm(dim=1).mean()


def test_bounded_updates_are_those_of_fedavg_cut_to_their_length(experiment: dict[str, Any], tmp_path: Path) -> None:
    def update(folder: str, **algorithm: Any) -> dict[str, Tensor]:
        session = prepared(experiment | {"algorithm": {"local_epochs": 1} | algorithm}, tmp_path / folder)
        server = session.server
        old = {key: value.clone() for key, value in server.weights["image"].items()}  # of one client
        session.experiment.algorithm.round(server, first_cohort(session))
        moved = server.weights["image"].items()
        return {key: value - old[key] for key, value in moved if value.is_floating_point() and "running_" not in key}

    def length(moved: dict[str, Tensor]) -> float:
        return float(torch.cat([value.flatten() for value in moved.values()]).norm())

    plain = update("plain", name="fedavg")
    free = update("free", name="bounded.Bounded", length=2 * length(plain))
    short = update("short", name="bounded.Bounded", length=0.25 * length(plain))
    for key, value in plain.items():
        assert torch.equal(free[key], value)
        assert torch.allclose(short[key], 0.25 * value, atol=1e-6)


def test_bounded_counts_shortened_updates_on_any_wire(experiment: dict[str, Any], tmp_path: Path) -> None:
    experiment |= {"algorithm": {"name": "bounded.Bounded", "local_epochs": 1, "length": 0.001}}
    plain = run(Experiment.load(experiment), tmp_path / "plain")
    assert plain.records.series("server", "clipped", "train") == {1: 1.0, 2: 1.0}
    assert encoded(experiment, tmp_path) == contents(plain.folder)


def test_a_modality_is_two_classes_and_a_column(
    experiment: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "explanation/how-a-method-works.md"
    code = next(block for block in blocks(page, "python") if "mypackage/sensors.py" in block)
    settings = next(block for block in blocks(page, "yaml") if "mypackage.sensors" in block)
    package, folder = tmp_path / "code" / "mypackage", tmp_path / "data" / "machines"
    for path in (package, folder):
        path.mkdir(parents=True)
    (package / "sensors.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    stream = torch.Generator().manual_seed(0)
    for split in ("train", "test"):
        faults = torch.arange(80) % 2
        readings = torch.randn(80, 16, generator=stream) + 3.0 * faults[:, None]  # easily separable
        table = {"readings": [row.numpy().tobytes() for row in readings], "fault": faults.tolist()}
        pq.write_table(pa.table(table), folder / f"{split}.parquet")

    content = {"algorithm": "local", "run": experiment["run"]} | yaml.safe_load(settings)
    content["data"]["dir"] = str(folder.parent)
    content["clients"]["plants"]["training"] = {"optimizer": {"lr": 0.01}}
    result = run(Experiment.load(content), tmp_path / "run")
    assert min(result.metrics(f"plants-{k}")["accuracy"] for k in range(4)) > 90


# ---- pages and code do not drift apart


def sections(annotation: Any) -> set[type[Settings]]:
    """The classes of settings below an annotation."""
    if not (isinstance(annotation, type) and issubclass(annotation, Settings)):
        return {one for below in get_args(annotation) for one in sections(below)}
    return {annotation, *(one for field in annotation.model_fields.values() for one in sections(field.annotation))}


def test_every_setting_is_described(generated: dict[str, str]) -> None:
    text, classes = "".join(generated.values()), sections(Experiment)
    assert {GroupSettings, OptimizerSettings, TwinSettings} <= classes
    assert [name for one in classes for name in one.model_fields if f"| `{name}` |" not in text] == []


def test_switches_of_creamfl_stand_with_their_defaults() -> None:
    page = (DOCS / "explanation" / "creamfl.md").read_text(encoding="utf-8")
    table = page.partition("## Every switch")[2].partition("###")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `?([^`|]+)`? \|", table, re.MULTILINE))
    assert {"contrast.weight", "contrast.inter.tau", "teacher.weights", "distiller.weight"} <= set(rows)
    for name, shown in rows.items():
        default = attrgetter(name)(CreamFL())
        assert yaml.safe_load(shown) == (default.component_name() if is_component(type(default)) else default), name


def test_tests_links_and_presets_that_pages_name_exist(generated: dict[str, str]) -> None:
    root, known = DOCS.parent, set(preset_names())
    for page in (root / "README.md", *DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
            assert f"def {name}" in (root / file).read_text(encoding="utf-8"), f"{page.name}: {file}::{name}"
        for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text):
            path = (page.parent / target).resolve()
            made = path.parent == DOCS / "reference" and path.name in generated
            assert made or path.exists(), f"{page.name}: {target}"
        assert set(re.findall(r"(?:polyfed run|extends:) ([a-z][\w-]+)(?=[\s`])", text)) <= known, page.name


def test_files_that_the_page_on_architecture_names_exist() -> None:
    page = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
    source, root = DOCS.parent / "src" / "polyfed", DOCS.parent
    named = set(re.findall(r"`?([a-z]+/[a-z_/]+\.py)", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (source / name).exists() and not (root / name).exists()] == []
