"""Three sites as real processes, with masked sums and noise: a worker that is killed in each phase changes nothing."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from federations import MARK, completed, marked, models, ports, python_path, spent, started, wait_until

from polyfed import Experiment, run
from polyfed.deploy.init import create_federation
from polyfed.runs.records import RunRecords

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

KILLER = Path(__file__).parent / "killer"
SITES = ("coast", "north", "south")


def settings(secret: Path | None = None, secure: str = "pairwise_masks") -> dict[str, Any]:
    texts = {"name": "scenes", "train": 60, "test": 8, "columns": {"text": "text"}, "targets": {"topic": "topic"}}
    encoder = {"name": "bag", "width": 8, "view": {"name": "tokens", "length": 16, "tokenizer": {"name": "hashing"}}}
    encoder["view"]["tokenizer"] |= {"size": 200}  # type: ignore[index]
    client: dict[str, Any] = {"count": 1, "task": {"name": "classification", "target": "topic"}}
    client["model"] = {"dim": 8, "encoders": {"text": encoder}}
    return {
        "name": "wards",
        "data": {"sources": {name: {**texts, "seed": seed} for seed, name in enumerate(("shared", *SITES))}},
        "server": {"source": "shared", "task": client["task"], "model": client["model"]},
        "clients": {name: {**client, "source": name} for name in SITES},
        "algorithm": {"name": "fedavg", "local_epochs": 1},
        "aggregation": {"secure": secure},
        "privacy": {
            "reply": {"weights": 1.0, "noise_multiplier": 4.0},
            "budget": {"epsilon": 3.0},
            "secret": None if secret is None else str(secret),
        },
        "run": {"rounds": 2, "threads": 1, "device": "cpu", "evaluate_clients": False},
    }


@pytest.mark.slow
def test_a_worker_that_is_killed_in_each_phase_keeps_bits_and_budget(tmp_path: Path) -> None:
    secret, mark, count = tmp_path / "secret", uuid.uuid4().hex, tmp_path / "count"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    port, superlink = ports()
    federation = tmp_path / "federation"
    experiment = Experiment.parse(settings())
    create_federation(federation, experiment, ["localhost"], port=port, superlink_port=superlink, keys=True)
    common = {MARK: mark, "POLYFED_CACHE": str(tmp_path / "cache")}
    # in round 1 each phase stores once, and once more when it is asked again
    killing = common | {"POLYFED_KILL": f"{count}:1,3,5,7", "PYTHONPATH": python_path(KILLER)}
    try:
        with ExitStack() as stack:
            server, log = str(federation / "server"), tmp_path / "server.log"
            served = stack.enter_context(started("server", server, log=log, environment=common))
            served.wait_for("open for sites")
            for name in SITES:
                path = federation / name / "site.yaml"
                path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"secret": str(secret)}))
                environment = killing if name == "north" else common
                log = tmp_path / f"{name}.log"
                stack.enter_context(started("site", str(federation / name), log=log, environment=environment))
            plan = str(federation / "server" / "experiment.yaml")
            completed(served, "run", plan, "--out", "run", environment=common, cwd=tmp_path)
    finally:
        wait_until(lambda: not marked(mark), 20, lambda: f"left: {marked(mark)}")
    assert len(count.read_bytes()) == 12, "four phases, each killed and done again, and four of the second round"
    # the same sums in the clear, of one process that nothing happens to
    alone = run(Experiment.parse(settings(secret, "unmasked")), tmp_path / "alone").folder
    assert RunRecords.load(tmp_path / "run").events == RunRecords.load(alone).events
    assert models(alone)
    assert models(tmp_path / "run") == models(alone)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (alone / "metrics.jsonl").read_bytes()
    assert spent(federation) == spent(alone)
    assert {name: len(costs) for name, costs in spent(federation).items()} == dict.fromkeys(SITES, 2)
