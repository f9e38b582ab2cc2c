"""A site is its key: who claims another's name, clients or seat gets nothing, and is named."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_grid import DESCRIBE, STEP, Rule, comes_back_as, dies_before, goes_away, pem
from federations_in_process import InProcess, SiteProcess
from struck_runs import events, reasons, results

from polyfed.core.errors import ExchangeError
from polyfed.core.files import write_atomically
from polyfed.deploy.engines.flower_node import Node
from polyfed.deploy.folders import create_keys, fingerprint, read_public
from polyfed.reporting.api import Reports
from polyfed.runs.events import RunComplete
from polyfed.runs.records import RunRecords

STRANGER = 7
Reply = dict[str, Any]


def impostor(federation: InProcess, tmp_path: Path, *, admitted_as: str = "clinic", site: str = "image") -> str:
    """A node with a key of its own and a copy of another site's folder; the fingerprint of its key."""
    folder = tmp_path / "impostor" / site
    shutil.copytree(federation.folder / site, folder, ignore=shutil.ignore_patterns("node.*", "state"))
    public = create_keys(folder)
    federation.grid.nodes[STRANGER] = (Node(SiteProcess()), {"config": str(folder / "site.yaml")})
    federation.grid.keys[STRANGER] = admitted_as, pem(public)
    return fingerprint(read_public(public))


def received(federation: InProcess, node: int) -> list[str]:
    """Types of all messages that were sent to a node."""
    return [m.metadata.message_type for m in federation.grid.pushed if m.metadata.dst_node_id == node]


def key_of(federation: InProcess, site: str) -> str:
    return fingerprint(read_public(federation.folder / site / "node.pub"))


def refusals(folder: Path) -> list[tuple[int, str, str]]:
    """Round, site and reason of all refusals in a run's metrics."""
    seen = [event for event in RunRecords.load(folder).events if event.incident == "site_refused"]
    return [(event.round, event.participant, event.reason) for event in seen]


# ---- a key that does not take part


def test_an_impostor_that_is_there_first_gets_nothing_and_is_named(
    federation: InProcess, undisturbed: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = impostor(federation, tmp_path)
    federation.grid.nodes = dict(sorted(federation.grid.nodes.items()))  # it is looked at first
    with caplog.at_level(logging.WARNING):
        folder = federation.run(tmp_path / "run").folder
    assert received(federation, STRANGER) == []
    reported = f"it is connected and not among run.engine.sites; it is sent nothing (key {key})"
    assert refusals(folder) == [(0, "clinic", reported)]
    assert f"site refused: clinic: {reported}" in caplog.text
    Reports().handle(RunComplete(folder))
    for report in ("report.md", "report.html"):
        assert key in (folder / report).read_text()
    left = results(folder)
    left.pop("metrics.jsonl")
    assert left.items() <= undisturbed.items()


@pytest.mark.slow
def test_an_impostor_that_comes_in_mid_run_gets_nothing_and_is_named(federation: InProcess, tmp_path: Path) -> None:
    keys = []

    def comes(delivery: Any) -> Any:
        keys.append(impostor(federation, tmp_path))
        return delivery.serve(delivery.message.content)

    federation.grid.rules = [
        Rule(comes, client="image", round=1, step="fit"),
        Rule(goes_away(3), client="image", round=2, step="fit"),  # while the seat is empty
    ]
    federation.engine["absence"] = 60.0
    folder = federation.run(tmp_path / "run", rounds=2).folder
    assert received(federation, STRANGER) == []
    assert [(participant, keys[0] in reason) for _, participant, reason in refusals(folder)] == [("clinic", True)]
    assert reasons(folder) == {}
    assert federation.grid.steps("image").count(("fit", 2)) == 2


@pytest.mark.slow
def test_a_node_without_a_name_or_a_key_is_not_a_site(federation: InProcess, tmp_path: Path) -> None:
    impostor(federation, tmp_path)
    for name, key in (("", federation.grid.keys[STRANGER][1]), ("image", b"")):
        federation.grid.keys[STRANGER] = name, key
        folder = federation.run(tmp_path / f"run-{name}", rounds=1).folder
        assert received(federation, STRANGER) == []
        reason = "SuperLink has no name or no key for it; admit sites with: polyfed deploy admit"
        assert refusals(folder)[0][1:] == ("unknown node", reason)


# ---- a second node, another key


def test_a_second_node_for_a_name_is_refused(federation: InProcess, tmp_path: Path) -> None:
    key = impostor(federation, tmp_path, admitted_as="image")
    folder = federation.run(tmp_path / "run", rounds=1).folder
    assert refusals(folder) == [(0, "image", f"it is connected by a second node, which is sent nothing (key {key})")]
    assert received(federation, STRANGER) == []


@pytest.mark.slow
def test_a_site_keeps_its_key_for_the_whole_run(federation: InProcess, tmp_path: Path) -> None:
    federation.grid.rules = [Rule(dies_before, client="paired-0", round=2, times=3)]
    with pytest.raises(ExchangeError):
        federation.run(tmp_path / "run", exchange={"min_clients": 2})
    federation.grid.nodes.pop(federation.node("image"))
    new = impostor(federation, tmp_path, admitted_as="image")
    folder = federation.resume(tmp_path / "run").folder
    reported = f"its key {new} is not {key_of(federation, 'image')}, with which it joined the run (see sites.json)"
    assert [(participant, reason) for _, participant, reason in refusals(folder)] == [("image", reported)]
    assert received(federation, STRANGER) == []
    assert {participant for _, participant, event in events(folder) if event == "client_excluded"} == {"image"}


@pytest.mark.slow
def test_the_operator_can_give_a_site_a_new_key_in_mid_run(federation: InProcess, tmp_path: Path) -> None:
    federation.grid.rules = [Rule(dies_before, client="paired-0", round=2, times=3)]
    with pytest.raises(ExchangeError):
        federation.run(tmp_path / "run", exchange={"min_clients": 2})
    node = federation.node("image")
    folder = federation.folder / "image"
    for path in (folder / "node.key", folder / "node.pub"):
        path.unlink()
    federation.grid.keys[node] = "image", pem(create_keys(folder))
    known = json.loads((tmp_path / "run" / "sites.json").read_text())
    known["image"]["key"] = key_of(federation, "image")
    write_atomically(tmp_path / "run" / "sites.json", json.dumps(known).encode())
    assert refusals(federation.resume(tmp_path / "run").folder) == []


@pytest.mark.slow
def test_a_site_that_is_back_under_another_node_id_is_itself(federation: InProcess, tmp_path: Path) -> None:
    federation.engine["absence"] = 60.0
    federation.grid.rules = [Rule(comes_back_as(999), client="image", round=2, step="fit")]
    assert events(federation.run(tmp_path / "run", rounds=2).folder) == []
    assert DESCRIBE in received(federation, 999)
    assert STEP in received(federation, 999)


# ---- a site that takes part


def test_a_site_that_cannot_be_opened_is_identified_by_its_key() -> None:
    def opener(spec: str, config: Any) -> Any:
        raise OSError(f"no such file: {config['config']}")

    fields, _ = Node(opener)("describe", {"spec": ""}, [], {"config": "/home/cancer-ward/site.yaml"})
    assert fields.keys() == {"error"}
    assert "ward" not in str(fields["error"])


def described_as(**values: Any) -> Callable[[Reply], Any]:
    return lambda reply: reply["clients"][0].update(values)


def failing(**claims: str) -> Callable[[Reply], Any]:
    return lambda reply: (reply.clear(), reply.update(error="no GPU", **claims))


CLAIMS: dict[str, tuple[Callable[[Reply], Any], str]] = {
    "another's name": (
        lambda reply: reply.update(site="paired"),
        "its node described itself wrongly: it claims to be site 'paired'; its key was admitted as 'image'$",
    ),
    "an error in another's name": (failing(site="paired"), ".*it claims to be site 'paired'; its key was"),
    "an error in no name": (failing(), "no GPU$"),
    "another's client": (described_as(id="paired-0"), ".*client 'paired-0', which carries the name of site 'paired'"),
    "another's group": (described_as(id="paired"), ".*client 'paired', which carries the name of site 'paired'"),
    "a client of no name": (described_as(id="ward"), ".*'ward', which does not carry its name, as 'image-1' does"),
    "a client of a like name": (
        described_as(id="imagery"),
        ".*'imagery', which does not carry its name, as 'image-1' does",
    ),
    "a client thrice": (
        lambda reply: reply.update(clients=3 * reply["clients"]),
        ".*it describes client 'image' more than once",
    ),
    "more clients than the operator allows": (
        lambda reply: reply["clients"].extend(reply["clients"][0] | {"id": f"image-{k}"} for k in (1, 2)),
        ".*it describes 3 clients, and may bring 1; .* set run.engine.clients.image to 3",
    ),
} | {
    str(values): (described_as(**values), "its node described itself wrongly")
    for values in (
        *({"samples": odd} for odd in (-1, "many", True)),
        *({"modalities": 5}, {"task": ["a"]}, {"more": 1}),
        *({"id": odd} for odd in ("../image", "two\nlines", "", "server")),
    )
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_site_that_claims_what_it_is_not_is_itself_refused(refusing: InProcess, tmp_path: Path, claim: str) -> None:
    change, reported = CLAIMS[claim]
    refusing.lies("image", change)
    refusing.grid.nodes = dict(reversed(refusing.grid.nodes.items()))
    with pytest.raises(ExchangeError, match=rf"^not all sites can take part: image: {reported}"):
        refusing.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda reply: reply.update(site="paired"),
        lambda reply: reply["clients"][0].update(id="paired-0"),
        lambda reply: reply["clients"].append(reply["clients"][0] | {"id": "image-2"}),
    ],
    ids=["name", "client", "new client"],
)
def test_a_changed_site_is_refused(federation: InProcess, tmp_path: Path, change: Callable[[Reply], Any]) -> None:
    """In mid-run: the other site's clients stay where they are, and nothing of theirs goes to the impostor."""

    def turns(delivery: Any) -> Any:
        federation.lies("image", change)
        return comes_back_as(999)(delivery)

    federation.grid.rules = [Rule(turns, client="image", round=2, step="fit")]
    folder = federation.run(tmp_path / "run", rounds=2, evaluate_clients=False).folder
    assert [(number, participant) for number, participant, _ in refusals(folder)] == [(2, "image")]
    assert key_of(federation, "image") in refusals(folder)[0][2]
    assert set(reasons(folder)) == {"image"}
    assert STEP not in received(federation, 999)
    assert federation.grid.steps("paired-0").count(("fit", 2)) == 1


def test_claims_of_a_node_are_shown_as_one_plain_line(refusing: InProcess, tmp_path: Path) -> None:
    refusing.lies("image", lambda reply: reply.update(site="\x1b[2J\nok: all is well" + "x" * 1000))
    with pytest.raises(ExchangeError) as caught:
        refusing.run(tmp_path / "run")
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
