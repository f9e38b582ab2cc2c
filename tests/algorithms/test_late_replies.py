"""Methods whose server takes steps before all have replied: by hand, against rounds that wait, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from by_hand import copies, play
from grids import mostly_slow
from misbehaving import contents, cut_short
from polyfed.algorithms.algorithm import Algorithm
from polyfed.runs.experiment import Experiment
from polyfed.wire.messages import Answer, Cause
from sessions import of_samples, prepared, taught, watched
from small_federations import METHODS, Config, federation_for

SLOW: Config = {"name": "drawn", "skew": 10}
LATE = [name for name in METHODS if Algorithm.named(name).takes_late_replies]


def paced(method: str, pace: Config | str, rounds: int = 4, **run: Any) -> Config:
    config = federation_for(method)
    config["run"] |= {"rounds": rounds, "eval_every": rounds, "pace": pace} | run
    return config


def checkpoints(folder: Path) -> dict[str, Any]:
    """Files of the last two rounds, byte by byte; of the manifests all but how long the log of seconds is."""
    files = {file.name: file.read_bytes() for file in (folder / "checkpoints").glob("round-*.safetensors")}
    manifests = [json.loads(file.read_text()) for file in sorted((folder / "checkpoints").glob("round-*.json"))]
    for manifest in manifests:
        del manifest["facts"]["logs"]["timing"]
    return files | {str(manifest["round"]): manifest for manifest in manifests}


def test_initial_weights_are_taken_as_they_are(tmp_path: Path) -> None:
    session = prepared(paced("fedavg", "buffered"), tmp_path)
    firsts = {client.architecture: client for client in reversed(session.server.clients)}
    asked, own = session.cohorts.blueprints(tuple(firsts.values())), session.federation.blueprints()
    assert {name: one.slots for name, one in asked.items()} == {name: one.slots for name, one in own.items()}
    for name, blueprint in asked.items():
        assert all(torch.equal(value, own[name].tensors[key]) for key, value in blueprint.tensors.items())


def test_weights_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W + sum n_c s_c (W_c - W_v) / sum n_c, of statistics W + sum n_c s_c (W_c - W) / sum n_c; a type at a time."""
    pace: Config = {"name": "buffered", "replies": 2, "clients": SLOW}
    session, tau = prepared(paced("fedavg", pace, 8), tmp_path), list[int]()
    seen, server, infos = watched(session, monkeypatch), session.server, {c.id: c for c in session.server.clients}
    for number in range(1, 9):
        seen.clear()
        before = copies(server.weights)
        play(session, number, number)
        assert len(seen) == 2
        for type_name, old in before.items():
            own = [pair for pair in seen if server.type_of(infos[pair[0].client]) == type_name]
            total = sum(answer.payload.fields["num_examples"] for _, answer in own)
            for name, value in old.items():
                expected = value.double().clone()
                for request, answer in own:
                    s, n = (1 + number - request.round) ** -0.5, answer.payload.fields["num_examples"]
                    then, trained = (message.payload.fields["weights"][name].double() for message in (request, answer))
                    start = value.double() if "running" in name else then
                    expected += n / total * s * (trained - start)
                if value.is_floating_point():
                    assert torch.allclose(server.weights[type_name][name].double(), expected, atol=1e-6), name
        tau += [number - request.round for request, _ in seen]
    assert max(tau) > 1


def test_representations_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a late set the server goes s of the way from its own; the teacher is the mean of these."""
    config = paced("creamfl", {"name": "buffered", "replies": 3, "clients": SLOW})
    config["algorithm"]["teacher"] = {"weights": "mean"}
    session = prepared(config, tmp_path)
    session.cohorts.timeline.times = dict(zip(session.cohorts.timeline.times, (1, 2, 5, 9), strict=True))
    seen, method = watched(session, monkeypatch), session.experiment.algorithm
    taught(session, 1)
    session.server.begin(2)
    seen.clear()
    outputs = method.public.server_outputs(session.server)
    own = of_samples(session, method.public.to_wire(session.server, outputs, outputs.order))["text"]
    target = taught(session, 2)["text"].values
    assert [(request.client, request.round) for request, _ in seen] == [("image", 2), ("text", 2), ("paired-1", 1)]
    fresh, late = (of_samples(session, answer.payload.fields["representations"])["text"] for _, answer in seen[1:])
    assert torch.allclose(target, (fresh + own + 2**-0.5 * (late - own)) / 2, atol=1e-5)


def test_who_does_not_reply_in_a_round_that_waits_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = prepared(paced("fedavg", {"name": "sync", "clients": SLOW}), tmp_path)
    gone = Answer.failed("image", Cause.LOST, "gone")
    watched(session, monkeypatch, lambda request, answer: gone if answer.client == "image" else answer)
    play(session, 1, 1)
    ended = {event.client: (event.event, event.error) for event in session.cohorts.timeline.events}
    assert ended.pop("image") == ("lost", "gone")
    assert {*ended.values()} == {("replied", None)}


@pytest.mark.parametrize("method", mostly_slow(LATE, "creamfl"))
def test_all_replies_at_equal_speed_are_a_round_that_waits(method: str, tmp_path: Path) -> None:
    """K = all: the same bits, in figures, bytes and models."""
    equal = {"clients": "drawn"}
    runs = [
        polyfed.run(Experiment.parse(paced(method, pace | equal, 2)), tmp_path / str(pace["name"]), quiet=True)
        for pace in ({"name": "sync"}, {"name": "buffered", "replies": 1.0, "staleness": "constant"})
    ]
    assert contents(runs[0]) == contents(runs[1])


@pytest.mark.parametrize("method", mostly_slow(LATE, "fedavg"))
def test_resumed_amid_a_buffer_it_ends_in_the_same_bits(method: str, tmp_path: Path) -> None:
    """Requests at work before the kill are answered after it, to the model that it was sent before."""
    config = paced(method, {"name": "buffered", "replies": 0.33, "clients": SLOW}, 6)
    finished = polyfed.run(Experiment.parse(config), tmp_path / "finished", quiet=True)
    assert not finished.records.excluded()
    asked = [json.loads(line) for line in (finished.folder / "pace.jsonl").read_text().splitlines()]
    assert any(line["asked"] < 4 <= line["round"] for line in asked if line["event"] == "replied")
    config["run"] |= {"engine": {"name": "local", "serialize": True}}
    resumed = polyfed.resume(cut_short(config, tmp_path / "run", at=4), quiet=True)
    assert contents(resumed) == contents(finished)
    assert checkpoints(resumed.folder) == checkpoints(finished.folder)
    assert (resumed.folder / "pace.jsonl").read_bytes() == (finished.folder / "pace.jsonl").read_bytes()
