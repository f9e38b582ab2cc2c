"""The transport in exchanges and in runs: both sides agree, and the ledger has both sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossings import crossed, model, of

from polyfed import Experiment, run
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.filters import Reply
from polyfed.reporting.run_tables import traffic_table
from polyfed.runs.records import RunRecords
from polyfed.wire.framing import wire_size
from polyfed.wire.ledger import Channel, Ledger
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Weights
from polyfed.wire.schema import client_step
from polyfed.wire.transport import Transport

# ---- the exchange


@client_step(weights=Weights)
def fit(algorithm: object, client: object, weights: Weights) -> Reply:
    """A step that the engine below performs."""
    raise NotImplementedError


class Adding:
    """Clients that add a little to one entry of what they receive."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for number, request in enumerate(requests):
            request = replace(request, payload=crossed(request.payload))
            new = {name: value.clone() for name, value in of(self.transport.decode(request.payload)).items()}
            new["linear"][number, 0] += 0.5
            yield Answer(request.client, crossed(self.transport.encode(Payload({"weights": Weights(new)}))))


def cohort_of(engine: Adding, **options: Any) -> Cohort:
    clients = tuple(ClientInfo(name, "g", ("image",), "classification", 10, 5, "arch") for name in "abc")
    return Cohort(clients, 1, Channel(engine.exchange, engine.transport, Ledger()), **options)


def test_the_ledger_has_both_sizes() -> None:
    cohort = cohort_of(Adding(Transport(weights="float16")))
    list(cohort.ask(fit, weights=Weights(model())))
    lines = [line for line in cohort.channel.ledger.records if line["client"] == "a"]
    whole = sum(value.nbytes for value in model().values())
    data = {(line["direction"], line["kind"]): (line["bytes"], line["full"], line["dtype"]) for line in lines}
    halved = 2 * (300 + 1200 + 40) + 8
    assert data["down", "weights"] == data["up", "weights"] == (halved, whole, "float16+int64")
    content = Payload({"weights": Weights(model())})
    for way in ("down", "up"):
        result = [line for line in lines if line["direction"] == way]
        assert sum(line["full"] for line in result) == wire_size(content)
    plain = Ledger()
    plain.enter(1, "a", "down", "fit", content)
    assert all(line["full"] == line["bytes"] for line in plain.records)


# ---- runs


def digest(folder: Path, *files: str) -> dict[str, str]:
    names = files or ("metrics.jsonl", "ledger.jsonl", "models/last/model.safetensors")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def finished(tiny: dict[str, Any], folder: Path, **settings: Any) -> RunRecords:
    """A run of FedAvg."""
    return run(Experiment.parse(tiny | {"run": tiny["run"] | settings}), folder).records


@pytest.fixture(scope="module")
def runs() -> dict[str, RunRecords]:
    """Runs that several tests look at, by name."""
    return {}


@pytest.fixture
def whole(tiny: dict[str, Any], runs: dict[str, RunRecords], tmp_path: Path) -> RunRecords:
    """All as it is."""
    return runs.setdefault("whole", runs.get("whole") or finished(tiny, tmp_path / "whole"))


@pytest.fixture
def short(tiny: dict[str, Any], runs: dict[str, RunRecords], tmp_path: Path) -> RunRecords:
    """With all options."""
    return runs.setdefault(
        "short", runs.get("short") or finished(tiny, tmp_path / "short", exchange={"transport": ALL})
    )


ALL = {"dtype": "float16", "weights": "bfloat16"}


def engines() -> list[Any]:
    yield_slow = [{"name": "ray", "workers": 2}, {"name": "flower", "nodes": 2}]
    return [{"name": "local", "serialize": True}, *[pytest.param(one, marks=pytest.mark.slow) for one in yield_slow]]


@pytest.mark.parametrize("engine", engines(), ids=lambda engine: str(engine["name"]))
def test_all_options_give_the_same_bits_on_every_engine(
    tiny: dict[str, Any], tmp_path: Path, short: RunRecords, engine: dict[str, Any]
) -> None:
    if engine["name"] != "local":
        pytest.importorskip("ray", reason="ray is not installed")
        pytest.importorskip("flwr", reason="flwr is not installed")
    other = finished(tiny, tmp_path / "other", exchange={"transport": ALL}, engine=engine)
    assert digest(short.folder) == digest(other.folder)
    assert not short.excluded()


def test_the_report_shows_the_saved_bytes(whole: RunRecords, short: RunRecords) -> None:
    assert list(traffic_table(whole).notes) == ["Replies: 0 clipped, 0 excluded."]
    mib = [f"{size / 2**20:,.2f}" for size in (short.total_bytes(), whole.total_bytes())]
    assert f"{mib[0]} MiB instead of {mib[1]} MiB (fp32, uncompressed)." in traffic_table(short).notes
    assert short.total_bytes() < 0.65 * whole.total_bytes()  # framing stays
    assert (short.folder / "report.md").read_text().count(" MiB instead of ") == 1
