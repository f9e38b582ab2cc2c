"""Every engine gives the same bits: metrics, ledger, and the weights of the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import failing
import pytest

import polyfed
from grids import mostly_slow
from misbehaving import contents
from polyfed import Experiment
from polyfed.core.errors import ExchangeError, StepError
from polyfed.runs.records import RunRecords
from small_federations import ENGINES, METHODS, Config, federation_for, topics

FORMS: dict[str, Config] = {
    "fedafd broadcasting twice": {"fusion": {"broadcast_every": 2}},
    "fedafd maps": {"fusion": {"level": "maps"}, "adversarial": {"update": "alternate"}},
    "fedavg adam": {"averaging": {"name": "by_type", "server_optimizer": "adam"}},
    "fedcola modules": {
        "averaging": {"name": "fedcola", "mean": "sequential"},
        "complement": {"send": "modules", "train_out": False},
    },
    "fedmd few": {"public": {"samples": 10}},
    "moon projected": {"projection": 4},
} | {method: {} for method in METHODS}
"""Method, and a word for its settings if these are not its own."""
ATTACKS = ("noise", "label_flip")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """One Ray for all tests here: the engines use one that is there, and starting it takes seconds."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("flwr", reason="flwr is not installed")
    from polyfed.engines.ray import start_ray

    start_ray(num_cpus=4)
    yield
    ray.shutdown()


def finished(config: Config, folder: Path, *, engine: Any = "local", **run_settings: Any) -> Path:
    experiment = Experiment.parse(config | {"run": config["run"] | {"engine": engine} | run_settings})
    return polyfed.run(experiment, folder, quiet=True).folder


@pytest.fixture
def where_it_runs(request: pytest.FixtureRequest, engine: str) -> None:
    """Starts Ray for the engines that need it."""
    if engine in ("ray", "flower"):
        request.getfixturevalue("ray_cluster")


def assert_same_bits(config: Config, folder: Path, engines: Iterable[str] = ENGINES, **run_settings: Any) -> None:
    """On every engine, in metrics, ledger and models."""
    expected = contents(finished(config, folder / "local", **run_settings))
    for name in engines:
        assert contents(finished(config, folder / name, engine=ENGINES[name], **run_settings)) == expected, name


@pytest.mark.usefixtures("where_it_runs")
@pytest.mark.parametrize(
    # Flower starts processes of its own, as the test of a deployment does: both are slow
    "engine",
    ["serialized", "ray", pytest.param("flower", marks=pytest.mark.slow)],
)
def test_every_engine_gives_the_same_bits(tiny: Config, tmp_path: Path, engine: str) -> None:
    """A method of two steps per round whose clients keep everything that they can."""
    assert_same_bits(tiny | {"algorithm": "two_phases.TwoPhases"}, tmp_path, [engine])


ATTACKED = [(engine, attack) for engine in ENGINES for attack in ATTACKS]


@pytest.mark.usefixtures("where_it_runs")
@pytest.mark.parametrize(("engine", "attack"), mostly_slow(ATTACKED, ("serialized", "noise")))
def test_attackers_and_robust_rules_are_the_same_everywhere(tmp_path: Path, attack: str, engine: str) -> None:
    """False replies and false data, sent in 16 bits."""
    config = topics(name="fedavg") | {"aggregation": {"robust": None if engine == "ray" else "geometric_median"}}
    config["clients"]["text"]["count"] = 5
    config["run"]["attackers"] = {"name": attack, "clients": 2}
    assert_same_bits(config, tmp_path, [engine], exchange={"transport": {"dtype": "float16"}})


@pytest.mark.usefixtures("where_it_runs")
@pytest.mark.parametrize("engine", mostly_slow(ENGINES, "serialized"))
def test_secure_sums_are_the_same_everywhere(tmp_path: Path, engine: str) -> None:
    """Keys and shares cross as messages of their own, and each round's secrets wait at the clients' place."""
    config = topics(name="fedavg") | {"aggregation": {"secure": "pairwise_masks"}}
    config["clients"]["text"]["count"] = 4
    assert_same_bits(config, tmp_path, [engine], exchange={"transport": {"dtype": "float16"}})


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("form", FORMS)
def test_every_engine_gives_the_same_bits_with_every_method(tmp_path: Path, form: str) -> None:
    assert_same_bits(federation_for(form.split()[0], **FORMS[form]), tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_transport_and_precision_are_the_same_everywhere(tiny: Config, tmp_path: Path, dtype: str) -> None:
    config = tiny | {"algorithm": {"name": "creamfl", "local_epochs": 1}}
    assert_same_bits(config, tmp_path, exchange={"transport": {"dtype": dtype}}, precision="bfloat16", rounds=1)


@pytest.mark.usefixtures("where_it_runs")
@pytest.mark.parametrize(
    ("engine", "on_error"),
    [
        ("local", None),
        ("local", "exclude"),
        pytest.param("ray", None, marks=pytest.mark.slow),
        pytest.param("flower", None, marks=pytest.mark.slow),
        pytest.param("flower", "stop", marks=pytest.mark.slow),
    ],
)
def test_errors_stop_runs_or_exclude_clients(tiny: Config, tmp_path: Path, engine: str, on_error: str | None) -> None:
    """On Flower, whose clients are another program's, it excludes by default."""
    config = tiny | {"algorithm": {"name": "failing.Failing"}, "run": tiny["run"] | {"exchange": {"min_clients": 3}}}
    out, stops = tmp_path / "run", (on_error or {"flower": "exclude"}.get(engine)) != "exclude"
    with pytest.raises(StepError if stops else ExchangeError, match="ZeroDivisionError: division by zero") as caught:
        finished(config, out, engine=engine, on_error=on_error)
    output, text = str(caught.value), (out / "tracebacks.log").read_text()
    line = next(n for n, line in enumerate(Path(failing.__file__).read_text().splitlines(), 1) if "1 / 0" in line)
    if stops:
        assert output.startswith("round 1: client 'image', step 'fit' of Failing: ZeroDivisionError: division by zero")
        assert f"({failing.__file__}:{line}; " in output
        assert isinstance(caught.value.__cause__, ZeroDivisionError) == (engine == "local")
    else:
        assert "2 of 3 clients" in output
    assert output.endswith(f"; clients' tracebacks: {out / 'tracebacks.log'}")
    assert "client image" in text
    assert "1 / 0" in text
    assert not RunRecords.load(tmp_path / "run").seconds  # the round was not complete


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_late_client_is_dropped_and_returns(tiny: Config, tmp_path: Path) -> None:
    config = tiny | {"algorithm": {"name": "failing.Sleeping", "seconds": 4.0, "round_number": 1}}
    for engine in ("local", {"name": "ray", "workers": 2}, {"name": "flower", "nodes": 3}):
        name = engine if isinstance(engine, str) else engine["name"]
        exchange = {"phases": {"fit": {"deadline": 2.0}}}
        folder = finished(config, tmp_path / name, engine=engine, exchange=exchange, evaluate_clients=False)
        events = [(event.round, event.participant, event.incident) for event in RunRecords.load(folder).events]
        assert events == [(1, "image", "client_excluded"), (2, "image", "client_returned")], name
