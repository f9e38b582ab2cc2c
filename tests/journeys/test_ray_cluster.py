"""Nodes of a Ray cluster: all are used, those that go are done without, those that come taken, with the same bits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polyfed
from misbehaving import contents
from polyfed import Experiment
from polyfed.core.errors import ConfigError
from polyfed.engines import ray as engine
from polyfed.engines.quiet import be_quiet
from small_federations import topics

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="ray is not installed")


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without CPUs, as a driver has it, and two nodes of one CPU each."""
    be_quiet()
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    made.nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    yield made
    ray.shutdown()
    made.shutdown()


def finished(folder: Path, cluster: Any = None, **settings: Any) -> dict[str, Any]:
    """Files of a run of three rounds, on the cluster or in this process."""
    chosen = "local" if cluster is None else {"name": "ray", "address": cluster.address, **settings}
    config = topics(name="scaffold")  # whose clients keep a state
    config["clients"]["text"]["count"] = 4
    run = config["run"] | {"rounds": 3, "threads": 1, "engine": chosen}
    return contents(polyfed.run(Experiment.parse(config | {"run": run}), folder, quiet=True).folder)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Nodes that have workers at each exchange; what to do once the first answer of exchange 0 is there."""
    import ray

    seen: dict[str, Any] = {"nodes": [], "then": lambda: None}
    exchange = engine.RayEngine.exchange

    def watching(self: engine.RayEngine, *arguments: Any) -> Iterator[Any]:
        while len(self._pool.workers) < seen.get("awaited", 0) and len(seen["nodes"]) > 1:  # starting takes seconds
            time.sleep(0.5)
            self._pool.grow()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        seen["nodes"].append((len(self._pool.workers), len(alive)))
        for number, answer in enumerate(exchange(self, *arguments)):
            yield answer
            if number == 0 and len(seen["nodes"]) == 1:
                seen["then"]()

    monkeypatch.setattr(engine.RayEngine, "exchange", watching)
    return seen


def test_every_node_is_used_with_the_bits_of_one_process(cluster: Any, watched: Any, tmp_path: Path) -> None:
    assert finished(tmp_path / "ray", cluster) == finished(tmp_path / "local")
    assert watched["nodes"][0] == (2, 3)  # not the driver's cores


def test_clients_of_a_node_that_dies_move_to_the_others(
    cluster: Any, watched: Any, tmp_path: Path, caplog: Any
) -> None:
    watched["then"] = lambda: cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)
    assert finished(tmp_path / "ray", cluster) == finished(tmp_path / "local")
    assert watched["nodes"][-1][0] == 1
    assert "its clients move to the 1 that are left" in caplog.text


def test_a_node_that_joins_is_used(cluster: Any, watched: Any, tmp_path: Path) -> None:
    watched |= {"then": lambda: cluster.add_node(num_cpus=1), "awaited": 3}
    assert finished(tmp_path / "ray", cluster) == finished(tmp_path / "local")
    assert watched["nodes"][0][0] == 2
    assert watched["nodes"][-1][0] == 3


def test_what_the_nodes_have_no_room_for_is_refused(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.engine\.workers is 3, .* have room for 2 of them \(CPUs by node: "):
        finished(tmp_path / "ray", cluster, workers=3)
    with pytest.raises(
        ConfigError, match=r"takes run\.threads=1 and run\.engine\.gpus=1; .* room for 0 .*GPUs by node"
    ):
        finished(tmp_path / "gpus", cluster, gpus=1)


def test_a_run_folder_that_nodes_do_not_see_is_refused(cluster: Any, tmp_path: Path, monkeypatch: Any) -> None:
    begin = engine._Pool._begin

    def elsewhere(pool: engine._Pool, *arguments: Any) -> None:
        pool._mark = Path("/of-another-machine") / pool._mark.name
        begin(pool, *arguments)

    monkeypatch.setattr(engine._Pool, "_begin", elsewhere)
    with pytest.raises(
        ConfigError, match=r"cannot use the run folder .*/ray: .* on storage that all nodes see under one"
    ):
        finished(tmp_path / "ray", cluster)
