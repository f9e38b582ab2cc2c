"""Flower's faults on a fake grid: nodes and processes that die, stay away, come back, or are never heard of."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_grid
import pytest
from federations_in_process import InProcess
from struck_runs import events, ready, reasons, results

from polyfed.core.errors import ExchangeError

pytestmark = pytest.mark.slow  # make test-engines; the other modules here stand for them in make test

Undisturbed = dict[str, bytes]


def _refusing(times: int) -> fake_grid.Fault:
    def fault(delivery: fake_grid.Delivery) -> Any:
        delivery.grid.refused = times
        return fake_grid.served(delivery)

    return fault


@pytest.mark.parametrize(
    "rules",
    [
        [],
        [fake_grid.Rule(fake_grid.dies_before, step="assess", times=2)],
        [fake_grid.Rule(_refusing(1), client="paired-0", round=1, step="fit")],
    ],
    ids=["undisturbed", "an evaluation is lost", "Flower does not take a message at once"],
)
def test_a_deployment_gives_the_bits_of_the_simulation(
    federation: InProcess, undisturbed: Undisturbed, tmp_path: Path, rules: list[fake_grid.Rule]
) -> None:
    federation.grid.rules = [replace(rule) for rule in rules]
    assert results(federation.run(tmp_path / "run").folder) == undisturbed


@pytest.mark.parametrize(
    "fault",
    [fake_grid.dies_before, fake_grid.dies_after, fake_grid.goes_away(3), fake_grid.comes_back_as(999)],
    ids=["before", "after", "away", "renamed"],
)
@pytest.mark.parametrize("client", ["image", "paired-1"])
def test_a_step_that_was_lost_is_done_again_to_the_same_bits(
    federation: InProcess, undisturbed: Undisturbed, tmp_path: Path, fault: fake_grid.Fault, client: str
) -> None:
    federation.engine["absence"] = 60.0
    federation.grid.rules = [fake_grid.Rule(fault, client=client, round=2, step="fit")]
    assert results(federation.run(tmp_path / "run").folder) == undisturbed
    assert federation.grid.steps(client).count(("fit", 2)) == 2


def test_a_step_that_is_lost_again_and_again_costs_its_clients_the_round(federation: InProcess, tmp_path: Path) -> None:
    federation.grid.rules = [fake_grid.Rule(fake_grid.dies_after, client="paired-0", round=2, step="fit", times=3)]
    folder = federation.run(tmp_path / "run", evaluate_clients=False).folder
    assert events(folder) == [
        *((2, client, "client_excluded") for client in ("paired-0", "paired-1")),
        *((3, client, "client_returned") for client in ("paired-0", "paired-1")),
    ]
    cause = "its node or process failed (3 times; run.engine.retries is 2): the ClientApp stopped responding"
    assert reasons(folder) == {"paired-0": cause, "paired-1": cause}
    labels = sorted(path.stem for path in federation.states("paired", "paired-0").iterdir())
    assert labels == ["000001-00", "000003-00"]  # what the lost steps of round 2 left is gone


def test_a_node_that_stays_away_is_waited_for_once(federation: InProcess, tmp_path: Path) -> None:
    federation.engine["absence"] = 1.0
    node, looks_left = federation.node("image"), []

    def noted(delivery: fake_grid.Delivery) -> Any:
        looks_left.append(federation.grid.away[node])
        return fake_grid.served(delivery)

    federation.grid.rules = [
        fake_grid.Rule(fake_grid.goes_away(fake_grid.MANY), client="image", round=2),
        fake_grid.Rule(noted, client="paired-0", round=3, step="fit"),
    ]
    folder = federation.run(tmp_path / "run", rounds=6).folder
    assert reasons(folder) == {"image": "its node is away for more than 1 s"}
    excluded = [(number, client) for number, client, event in events(folder) if event == "client_excluded"]
    assert excluded == [(number, "image") for number in (2, 2, 3, 3, 4, 4, 5, 5, 6, 6)]
    assert looks_left[0] - federation.grid.away[node] < 300  # a second of waiting has many more, in each of eight asks


def test_a_node_that_is_back_takes_part_again(federation: InProcess, tmp_path: Path) -> None:
    federation.engine["absence"] = 0.0
    federation.grid.rules = [fake_grid.Rule(fake_grid.goes_away(10), client="image", round=2)]
    folder = federation.run(tmp_path / "run", rounds=12, evaluate_clients=False).folder
    kinds = [event for _, participant, event in events(folder) if participant == "image"]
    assert kinds[-1] == "client_returned"
    assert len(kinds) == len(events(folder)) >= 2
    assert federation.grid.steps("image")[-1] == ("fit", 12)


# ---- deadlines and quorum


def test_a_node_never_heard_of_is_late_and_asked_again_in_the_next_round(federation: InProcess, tmp_path: Path) -> None:
    federation.grid.rules = [fake_grid.Rule(fake_grid.is_silent, client="image", round=2, step="fit")]
    exchange = {"phases": {"fit": {"deadline": 0.2}}}
    folder = federation.run(tmp_path / "run", exchange=exchange, evaluate_clients=False).folder
    assert events(folder) == [(2, "image", "client_excluded"), (3, "image", "client_returned")]
    assert reasons(folder) == {"image": "no answer within 0.2 s"}


def test_clients_that_share_a_message_have_a_deadline_each(federation: InProcess, tmp_path: Path) -> None:
    federation.grid.rules = [fake_grid.Rule(fake_grid.is_silent, client="paired-0", round=1, step="fit")]
    started = time.monotonic()
    with pytest.raises(ExchangeError, match=r"\(paired-0, paired-1: no answer within 0\.5 s\)"):
        federation.run(tmp_path / "run", exchange={"phases": {"fit": {"deadline": 0.5, "min_clients": 3}}})
    assert time.monotonic() - started > 1


@pytest.mark.parametrize(
    ("patience", "needed"),
    [({"min_clients": 0.9}, 3), ({"min_clients": 1, "phases": {"fit": {"min_clients": 2}}}, 2)],
    ids=["share", "of the step"],
)
def test_too_few_stop_the_run_with_the_causes_and_a_resume_ends_in_the_same_bits(
    federation: InProcess, undisturbed: Undisturbed, tmp_path: Path, patience: dict[str, object], needed: int
) -> None:
    federation.grid.rules = [fake_grid.Rule(fake_grid.dies_after, client="paired-1", round=2, step="fit", times=3)]
    reported = rf"round 2: 1 of 3 clients .* 'fit', the quorum .*min_clients\) is {needed} "
    with pytest.raises(ExchangeError, match=rf"{reported}\(paired-0, paired-1: its node or process failed"):
        federation.run(tmp_path / "run", exchange=patience)
    assert results(federation.resume(tmp_path / "run").folder) == undisturbed


# ---- joining


def test_a_site_that_does_not_join_is_named_and_nothing_is_left(federation: InProcess, tmp_path: Path) -> None:
    federation.grid.away[federation.node("image")] = fake_grid.MANY
    with pytest.raises(ExchangeError, match=r"not all sites can take part: image: did not join within 0\.3 s"):
        federation.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_site_that_joins_late_is_waited_for(federation: InProcess, tmp_path: Path) -> None:
    federation.engine["join"] = 60.0
    federation.grid.away[federation.node("image")] = 5
    assert events(federation.run(tmp_path / "run", rounds=1).folder) == []


def test_a_node_that_fails_to_describe_itself_is_asked_again(federation: InProcess, tmp_path: Path) -> None:
    federation.engine["join"] = 60.0
    federation.grid.rules = [fake_grid.Rule(fake_grid.dies_before, kind=fake_grid.DESCRIBE, times=3)]
    assert events(federation.run(tmp_path / "run", rounds=1).folder) == []


@pytest.mark.parametrize("fault", [fake_grid.dies_before, fake_grid.is_silent], ids=["dies", "silent"])
def test_waiting_for_an_undescribed_node_ends(federation: InProcess, tmp_path: Path, fault: fake_grid.Fault) -> None:
    federation.grid.rules = [fake_grid.Rule(fault, kind=fake_grid.DESCRIBE, times=fake_grid.MANY)]
    with pytest.raises(ExchangeError, match=r"paired: did not join within 0\.3 s; image: did not join within 0\.3 s"):
        federation.run(tmp_path / "run")


def test_messages_that_flower_never_takes_cost_their_clients_the_round(federation: InProcess, tmp_path: Path) -> None:
    federation.grid.rules = [fake_grid.Rule(_refusing(4), client="paired-0", round=1, step="assess")]
    folder = federation.run(tmp_path / "run").folder
    refused = f"Flower refused a message to node {federation.node('paired')}"
    assert reasons(folder) == {"paired-0": refused, "paired-1": refused}
    assert events(folder)[-1][2] == "client_returned"


def test_a_resumed_run_goes_on_without_a_site_that_is_not_there(federation: InProcess, tmp_path: Path) -> None:
    federation.grid.rules = [fake_grid.Rule(fake_grid.dies_before, client="paired-0", round=2, times=3)]
    with pytest.raises(ExchangeError):
        federation.run(tmp_path / "run", exchange={"min_clients": 2})
    federation.grid.away[federation.node("image")] = fake_grid.MANY
    folder = federation.resume(tmp_path / "run").folder
    excluded = {(number, client) for number, client, event in events(folder) if event == "client_excluded"}
    assert excluded == {(2, "image"), (3, "image")}


# ---- content of a failed step's answer


@pytest.mark.parametrize("reported", [True, False])
def test_sites_permit_tracebacks(keeping: dict[str, Any], tmp_path: Path, grid_messages: None, reported: bool) -> None:
    federation = InProcess.made(tmp_path / "federation", ready(keeping, tmp_path, "local", how="raise"))
    federation.edit("image", {"tracebacks": reported})
    folder = federation.run(tmp_path / "run", evaluate_clients=False).folder
    reason = "ValueError: no GPU left" if reported else r"ValueError: error [0-9a-f]{8} in the site's log"
    assert re.fullmatch(reason, reasons(folder)["image"])
    assert (folder / "tracebacks.log").exists() == reported
