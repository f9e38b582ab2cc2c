"""Masked sums in rounds that do not wait: of fixed groups, by hand, whoever drops out, after a kill, in real time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from by_hand import copies, play
from masked_runs import Faulty, between, federation, left
from misbehaving import contents, cut_short
from polyfed import Experiment
from polyfed.core.errors import ConfigError, ExchangeError
from polyfed.federation.client import ClientInfo
from polyfed.federation.group_sums import mask_groups
from polyfed.privacy.masking.fixed_point import FixedPoint
from polyfed.privacy.masking.mask_keeper import KEYS, OPENING
from polyfed.privacy.masking.summed import SummedReply
from polyfed.runs.experiment import merged
from sessions import prepared
from small_federations import Config

GROUPS: Config = {"name": "buffered", "replies": 3, "clients": {"name": "drawn", "skew": 10}}


def grouped(
    secure: Any = "pairwise_masks", clients: int = 6, rounds: int = 5, method: Any = "fedavg", **run: Any
) -> Config:
    config = federation(secure, clients, method, rounds=rounds, eval_every=rounds, **{"pace": GROUPS} | run)
    config["algorithm"]["local_epochs"] = 1
    return config


def paced(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "pace.jsonl").read_text().splitlines()]


def test_groups_are_dealt_out_of_every_type() -> None:
    many = [ClientInfo(f"{kind}{k}", kind, ("image",), "task", 1, kind) for kind in "ab" for k in range(7)]
    groups = mask_groups(many, 6)
    assert [[client.id for client in group] for group in groups] == [
        ["a0", "a2", "a4", "a6", "b1", "b3", "b5"],
        ["a1", "a3", "a5", "b0", "b2", "b4", "b6"],
    ]
    assert mask_groups(many, 8) == mask_groups(many, 14) == [tuple(many)]


def test_a_group_of_all_is_a_round_that_waits(tmp_path: Path) -> None:
    runs = [
        polyfed.run(Experiment.parse(grouped(rounds=2, pace=pace | {"clients": "drawn"})), tmp_path / name, quiet=True)
        for name, pace in (("a", {"name": "sync"}), ("b", {"name": "buffered", "replies": 1.0}))
    ]
    assert contents(runs[0]) == contents(runs[1])


def test_a_killed_run_ends_in_the_bits_of_an_unmasked_one(tmp_path: Path) -> None:
    """Amid a group: its members make new keys for what they were asked before."""
    clear = polyfed.run(Experiment.parse(grouped("unmasked")), tmp_path / "clear", quiet=True)
    replied = [line for line in paced(clear.folder) if line["event"] == "replied"]
    assert any(line["asked"] < 3 <= line["round"] for line in replied)
    members = {tuple(line["client"] for line in replied if line["round"] == number) for number in range(1, 6)}
    assert members == {("text-0", "text-2", "text-4"), ("text-1", "text-3", "text-5")}
    resumed = polyfed.resume(cut_short(grouped(), tmp_path / "cut", at=3), quiet=True)
    assert left(resumed.folder) == left(clear.folder)
    assert paced(resumed.folder) == paced(clear.folder)


def test_a_late_group_by_hand(tmp_path: Path) -> None:
    """W + s (mean by samples of W_c - W_v), once all of the group have replied."""
    session = prepared(grouped("unmasked"), tmp_path)
    engine, (kind,), tau, numbers = between(session), session.server.weights, list[int](), FixedPoint()
    for number in range(1, 6):
        engine.seen.clear()
        before = copies(session.server.weights)[kind]
        play(session, number, number)
        then = engine.seen[0][0].payload.fields["weights"]
        words, sizes = 0, 0
        for _, answer in engine.seen:
            assert answer.payload is not None
            own: Any = SummedReply.received(answer.payload, numbers).words.view("int32").astype("int64")
            words, sizes = words + own[:-1], sizes + own[-1]
        total, place = sum(session.server.weight(c) for c in session.server.clients if c.id in _asked(engine)), 0
        assert sizes == total == 180
        tau.append(number - engine.seen[0][0].round)
        for name in sorted(before):
            size = before[name].numel()
            mean = torch.from_numpy(words[place : place + size] * 64 / 2**30).reshape(before[name].shape)
            expected = before[name].double() + (1 + tau[-1]) ** -0.5 * (mean - then[name].double())
            assert torch.allclose(session.server.weights[kind][name].double(), expected, atol=1e-6), name
            place += size
    assert max(tau) > 1


def _asked(engine: Faulty) -> set[str]:
    return {request.client for request, _ in engine.seen}


@pytest.mark.parametrize("step", [KEYS, "fit", OPENING])
def test_who_drops_out_of_a_group_is_recovered(step: str, tmp_path: Path) -> None:
    changes: Config = {"run": {"pace": {"replies": 4}}}
    masked, plain = (prepared(merged(grouped(how, clients=8), changes), tmp_path / how) for how in HOW)
    lost = {("text-2", step): "its power failed"}
    between(masked, loses=lost)
    between(plain, loses=lost if step == "fit" else {("text-2", "fit"): "its power failed"} if step == KEYS else {})
    for session in (masked, plain):
        play(session, 1, 3)
    (kind,) = masked.server.weights
    assert all(
        torch.equal(value, plain.server.weights[kind][name]) for name, value in masked.server.weights[kind].items()
    )
    told = {
        (event.event, event.step, event.error) for event in masked.cohorts.timeline.events if event.client == "text-2"
    }
    failed = ("replied" if step == OPENING else "lost", step, "its power failed")
    assert told == {("started", "fit", None), failed}


HOW = ("pairwise_masks", "unmasked")


def test_privacy_is_charged_for_every_request_of_a_group(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    config = grouped()
    config["privacy"] = {"reply": {"weights": 1.0, "noise_multiplier": 4.0}, "metrics": "clear"}
    run = polyfed.run(Experiment.parse(config), tmp_path, quiet=True)
    started = Counter(line["client"] for line in paced(run.folder) if line["event"] == "started")
    spent = {client: run.records.last(client, "privacy")["replies"] for client in started}
    assert len({*started.values()}) > 1
    assert spent == started


def test_too_few_of_a_group_stop_the_run_by_name(tmp_path: Path) -> None:
    session = prepared(grouped(), tmp_path)
    between(session, loses={(f"text-{k}", "fit"): "its power failed" for k in (0, 1)})
    with pytest.raises(ExchangeError, match=r"2 of 3 clients are left, .* needs 3 \(missing: text-\d: its power"):
        play(session, 1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {"pace": {"name": "async"}}}, "a sum of one reply hides nothing; set run.pace to buffered"),
        ({"run": {"pace": {"name": "deadline", "seconds": 3}}}, "who is late has masks of a sum that is over"),
        ({"run": {"pace": {"replies": {"text": 3}}}}, "run.pace.replies by modality is none; give a number"),
        ({"run": {"pace": {"replies": 2}}}, "in groups of 2 .raise run.pace.replies for.*needs 3 clients of a type"),
        ({"run": {"pace": {"concurrency": 2}}}, "run.pace.concurrency is 2, and aggregation.secure asks 3 at once"),
        ({"run": {"sampling": {"cohort": 4}}}, "run.sampling.cohort draws other clients each round"),
        ({"run": {"min_clients": 4}}, "run.min_clients is 4, but a round of run.pace 'buffered' ends after 3"),
    ],
)
def test_refused(changes: Config, message: str, tmp_path: Path) -> None:
    config = grouped()
    if "name" in changes["run"].get("pace", {}):
        config["run"]["pace"] = {}
    with pytest.raises(ConfigError, match=message):
        polyfed.run(Experiment.parse(merged(config, changes)), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
