"""Sites with masked sums, and with noise: processes that die in any phase change neither bits nor budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed")

from fake_grid import Fault, Rule, dies_after, dies_before
from federations_in_process import InProcess
from struck_runs import events, reasons, results

import polyfed
from grids import mostly_slow
from polyfed import Experiment
from polyfed.core.errors import ExchangeError
from polyfed.deploy.folders import create_keys, read_public
from polyfed.deploy.settings import SiteRoster, load_settings
from polyfed.federation import secure_ask
from polyfed.privacy.guard import PRIVATE
from polyfed.privacy.masking.mask_keeper import KEYS, OPENING, SHARES, bytes_bundle
from polyfed.privacy.masking.party import Party, context_of
from polyfed.wire.payload import Payload
from small_federations import topics

CLIENTS = ("coast", "north", "south-0", "south-1")
LOST = {"north": 1, "coast": 2}
SITES = ("north", "south", "coast")


def hospitals(**sections: Any) -> dict[str, Any]:
    """Three sites of texts with one model; ``south`` has two clients."""
    config = topics(name="fedavg")
    text = config["clients"].pop("text")
    config["server"] = {key: text[key] for key in ("source", "task", "model")}
    config["clients"] = {name: {**text, "count": 2 if name == "south" else 1} for name in SITES}
    config["data"]["sources"]["texts"] |= {"train": 60, "test": 40}
    config["run"] |= {"rounds": 2, "evaluate_clients": True} | sections.pop("run", {})
    return config | sections


MASKED: dict[str, Any] = {"aggregation": {"secure": "pairwise_masks"}}
NOISY: dict[str, Any] = {
    "privacy": {"reply": {"weights": 1.0, "noise_multiplier": 4.0}, "budget": {"epsilon": 3.0}},
    "run": {"evaluate_clients": False},
}


def left(folder: Path) -> dict[str, bytes]:
    """Without the ledger, in which the phases of keys are entered."""
    content = {name: content for name, content in results(folder).items() if name != "ledger.jsonl"}
    assert any(name.startswith("models") for name in content)
    return content


@pytest.fixture(scope="module")
def in_the_clear(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Results of the same sums without masks, in one process."""
    config = hospitals(aggregation={"secure": "unmasked"})
    return left(polyfed.run(Experiment.parse(config), tmp_path_factory.mktemp("clear") / "run", quiet=True).folder)


@pytest.fixture
def masked(tmp_path: Path, grid_messages: None) -> InProcess:
    return InProcess.made(tmp_path / "federation", hospitals(**MASKED), absence=60.0)


def test_masked_sums_have_the_clear_bits(masked: InProcess, in_the_clear: Mapping[str, bytes], tmp_path: Path) -> None:
    run = masked.run(tmp_path / "run")
    assert left(run.folder) == in_the_clear
    assert events(run.folder) == []


@pytest.mark.parametrize(
    ("step", "client", "fault"),
    mostly_slow(
        # the other one of south is in the same message as south-0
        product((KEYS, SHARES, "fit", OPENING), ("north", "south-0"), (dies_before, dies_after)),
        (SHARES, "south-0", dies_after),
        (OPENING, "south-0", dies_before),
    ),
)
def test_a_site_that_dies_in_a_phase_changes_nothing(
    masked: InProcess, in_the_clear: Mapping[str, bytes], tmp_path: Path, step: str, client: str, fault: Fault
) -> None:
    masked.grid.rules = [Rule(fault, client=client, round=2, step=step)]
    run = masked.run(tmp_path / "run")
    assert masked.grid.steps(client).count((step, 2)) == 2
    assert left(run.folder) == in_the_clear
    assert reasons(run.folder) == {}


def test_a_site_that_is_gone_for_good_stops_the_round_and_a_resume_ends_in_the_same_bits(
    masked: InProcess, in_the_clear: Mapping[str, bytes], tmp_path: Path
) -> None:
    # of four clients three are needed: two that are lost are one too many
    masked.grid.rules = [Rule(dies_before, client="south-0", round=2, step="fit", times=3)]
    with pytest.raises(ExchangeError, match=r"'fit', type .*: 2 of 4 clients are left.*south-0.*south-1"):
        masked.run(tmp_path / "run")
    assert left(masked.resume(tmp_path / "run").folder) == in_the_clear


# ---- rosters


def test_a_site_with_another_key_than_the_rosters_stops_the_sum_by_name(masked: InProcess, tmp_path: Path) -> None:
    path, stranger = masked.folder / "north" / "roster.yaml", create_keys(tmp_path / "stranger")
    sites = load_settings(SiteRoster, path).sites
    forged = sites["coast"].model_copy(update={"key": read_public(stranger)})
    SiteRoster(sites=sites | {"coast": forged}).write(path)
    masked.grid.rules = [Rule(dies_before, client="south-1", round=1, step=SHARES, times=9)]
    with pytest.raises(ExchangeError, match=r"north: PayloadError: keys of 'coast' are not signed by its site"):
        masked.run(tmp_path / "run")


def test_own_keys_of_a_server_are_found_out(masked: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_keys = secure_ask._TypeSum.keys

    def substituted(type_sum: Any) -> Payload:
        forged = Party("north", context_of("run", 1, 0))
        reported = dict(own_keys.fget(type_sum).fields)  # type: ignore[attr-defined]
        return Payload(reported | {KEYS: bytes_bundle(type_sum.public | {"north": forged.public})})

    monkeypatch.setattr(secure_ask._TypeSum, "keys", property(substituted))
    with pytest.raises(ExchangeError, match=r"coast: PayloadError: keys of 'north' are not signed by its site"):
        masked.run(tmp_path / "run")
    assert not any(step == "fit" for site in SITES for step, _ in masked.grid.steps(site))


# ---- budgets


def spent(federation: InProcess) -> dict[str, list[Any]]:
    """Charges in each client's ledger."""
    ledgers = {at.stem: at for site in SITES for at in (federation.folder / site / "state" / PRIVATE).glob("*.jsonl")}
    lines = {name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in ledgers.items()}
    return {name: [line for line in own if line["cost"] is not None] for name, own in lines.items()}


def noisy(folder: Path, **sections: Any) -> InProcess:
    """A federation with noise from the same secret wherever it is made."""
    federation = InProcess.made(folder, hospitals(**NOISY, **sections), absence=60.0)
    for site in SITES:
        secret = folder / site / "secret"
        secret.write_bytes(bytes(range(32)))
        secret.chmod(0o600)
        federation.edit(site, {"secret": "secret"})
    return federation


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        pytest.param({}, dies_before, id="noise-before", marks=pytest.mark.slow),
        pytest.param({}, dies_after, id="noise-after", marks=pytest.mark.slow),  # spent, and not heard of
        pytest.param(MASKED, dies_before, id="masks-before", marks=pytest.mark.slow),
        pytest.param(MASKED, dies_after, id="masks-after"),
    ],
)
def test_noise_is_not_spent_twice(tmp_path: Path, grid_messages: None, sections: dict[str, Any], fault: Fault) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    quiet, struck = (noisy(tmp_path / name, **sections) for name in ("quiet", "struck"))
    expected = left(quiet.run(tmp_path / "run").folder)
    struck.grid.rules = [Rule(fault, client=name, round=number, step="fit") for name, number in LOST.items()]
    assert left(struck.run(tmp_path / "again").folder) == expected
    assert spent(struck) == spent(quiet)
    assert {name: len(releases) for name, releases in spent(struck).items()} == dict.fromkeys(CLIENTS, 2)
