"""Every engine gives the same bits: metrics, ledger, and the weights of the server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from federations import aligned, transformers
from polyfed import Experiment
from polyfed.core.errors import ExchangeError
from polyfed.runs.records import RunRecords
from polyfed.runs.runner import run_experiment

SEQUENTIAL = {"name": "fedcola", "mean": "sequential"}
METHODS: dict[str, dict[str, Any]] = {"two_phases": {"name": "two_phases.TwoPhases"}}
MORE_METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "local_epochs": 1},
    "creamfl": {"name": "creamfl", "local_epochs": 1},
    "fedafd": {"name": "fedafd", "local_epochs": 1, "broadcast_every": 2},
    "fedmd": {"name": "fedmd", "local_epochs": 1, "public_samples": 40},
    "local": {"name": "local", "local_epochs": 1},
    "fedafd-maps": {"name": "fedafd", "local_epochs": 1, "fusion": "maps", "baa_update": "alternate"},
    "fedgems": {"name": "fedgems", "local_epochs": 1},
    "fedet": {"name": "fedet", "local_epochs": 1},
    "fedmkd": {"name": "fedmkd", "local_epochs": 1, "kd_epochs": 1, "predictor_width": 8},
    "margin_weighted": {"name": "margin_weighted", "local_epochs": 1},
    "fedproto": {"name": "fedproto", "local_epochs": 1},
    "fedtgp": {"name": "fedtgp", "local_epochs": 1},
    "fedprox": {"name": "fedprox", "local_epochs": 1},
    "moon": {"name": "moon", "local_epochs": 1, "projection": 4},
    "scaffold": {"name": "scaffold", "local_epochs": 1},
    "fedema": {"name": "fedema", "local_epochs": 1},
    "creamfl_averaged": {"name": "creamfl_averaged", "local_epochs": 1, "gamma": 0.5},
    "server_adam": {"name": "fedavg", "local_epochs": 1, "averaging": {"name": "by_type", "server_optimizer": "adam"}},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "fedcola": {"name": "fedcola"},
    "fedcola-sequential": {"name": "fedcola", "averaging": SEQUENTIAL, "send": "modules", "train_out": False},
    "fediot": {"name": "fediot"},
    "fed_mae": {"name": "fed_mae", "decoder_depth": 1, "decoder_width": 32, "decoder_heads": 4},
}
_AID: dict[str, Any] = {"name": "fedaid", "local_steps": 2, "robust_steps": 2}
ALIGNED: dict[str, dict[str, Any]] = {
    "fedaid": _AID,
    "fedaid-repeated": _AID | {"broadcast": "repeated", "aligner_in_stage_two": "local"},
    "feddra": {"name": "feddra", "local_steps": 2, "robust_steps": 2},
}
ENGINES: dict[str, dict[str, Any]] = {
    "serialized": {"name": "local", "serialize": True},
    "ray": {"name": "ray", "workers": 2},
    "flower": {"name": "flower", "nodes": 2},
}


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """One Ray for all tests here: the engines use one that is there, and starting it takes seconds."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("flwr", reason="flwr is not installed")
    from polyfed.engines.ray import start_ray

    start_ray(num_cpus=4)
    yield
    ray.shutdown()


def digest(folder: Path) -> dict[str, str]:
    files = [folder / "metrics.jsonl", folder / "ledger.jsonl", *sorted((folder / "models").rglob("*.safetensors"))]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def finished(config: dict[str, Any], folder: Path, *, engine: Any = "local", **run_settings: Any) -> Path:
    return run_experiment(
        Experiment.parse(config | {"run": config["run"] | {"engine": engine} | run_settings}), folder
    ).folder


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_METHODS)])
def test_every_engine_gives_the_same_bits(tiny: dict[str, Any], tmp_path: Path, method: str) -> None:
    config = tiny | {"algorithm": (METHODS | MORE_METHODS)[method]}
    expected = digest(finished(config, tmp_path / "local"))
    assert len(expected) > 3
    for name, engine in ENGINES.items():
        assert digest(finished(config, tmp_path / name, engine=engine)) == expected, name


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("method", [*BLOCKS, *ALIGNED])
def test_every_engine_gives_the_same_bits_with_transformers_and_aligners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    config = transformers(**BLOCKS[method]) if method in BLOCKS else aligned(**ALIGNED[method])
    expected = digest(finished(config, tmp_path / "local"))
    for name, engine in ENGINES.items():
        assert digest(finished(config, tmp_path / name, engine=engine)) == expected, name


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_narrow_transport_and_precision_are_the_same_everywhere(
    tiny: dict[str, Any], tmp_path: Path, dtype: str
) -> None:
    config = tiny | {"algorithm": MORE_METHODS["creamfl"]}
    settings = {"transport": {"dtype": dtype}, "precision": "bfloat16", "rounds": 1}
    expected = digest(finished(config, tmp_path / "local", **settings))
    for name, engine in ENGINES.items():
        assert digest(finished(config, tmp_path / name, engine=engine, **settings)) == expected, name


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "engine", ["local", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ray", "flower"))]
)
def test_a_clients_traceback_reaches_the_user(tiny: dict[str, Any], tmp_path: Path, engine: str) -> None:
    config = tiny | {"algorithm": {"name": "failing.Failing"}, "run": tiny["run"] | {"min_clients": 3}}
    with pytest.raises(ExchangeError, match=r"2 of 3 clients .* ZeroDivisionError: division by zero"):
        finished(config, tmp_path / "run", engine=engine)
    text = (tmp_path / "run" / "tracebacks.log").read_text()
    assert "client image" in text
    assert "1 / 0" in text
    assert not RunRecords.load(tmp_path / "run").seconds  # the round was not complete


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_late_client_is_dropped_and_returns(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = tiny | {"algorithm": {"name": "failing.Sleeping", "seconds": 4.0, "round_number": 1}}
    for engine in ("local", {"name": "ray", "workers": 2}, {"name": "flower", "nodes": 3}):
        name = engine if isinstance(engine, str) else engine["name"]
        phases = {"fit": {"deadline": 2.0}}
        folder = finished(config, tmp_path / name, engine=engine, phases=phases, evaluate_clients=False)
        events = [(event.round, event.participant, event.event) for event in RunRecords.load(folder).events]
        assert events == [(1, "image", "client_excluded"), (2, "image", "client_returned")], name
