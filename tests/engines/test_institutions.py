"""Answers of an institution's clients: each ask for one request, and no more asks than a run has."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from misbehaving import raising
from polyfed.engines.outgoing import SiteTerms
from polyfed.engines.site import Site
from polyfed.federation.client import Client
from polyfed.privacy.answered import FILE
from polyfed.wire.messages import Cause, Request
from polyfed.wire.payload import Payload, Representations, Weights
from sessions import asked, prepared, site_of
from small_federations import Config, federation_for, topics

NOISE: Config = {"privacy": {"reply": {"weights": 1.0, "noise_multiplier": 4.0}, "metrics": "clear"}}


def institution(folder: Path, config: Config | None = None, run: str = "a-run") -> Site:
    """A place with an account over all its runs, of which this is one."""
    site = site_of(prepared(config or small(), folder / run))
    site.spec = site.spec.model_copy(update={"run": run})
    site.terms = SiteTerms(private=folder / ".privacy")
    return site


def small(**run: Any) -> Config:
    config = topics(name="fedavg")
    config["data"]["sources"]["texts"] |= {"train": 60, "test": 20}
    config["run"] |= {"rounds": 2} | run
    return config


def reported(site: Site, request: Request) -> str:
    """Text of a refusal at the server."""
    failure = site.answer(request, tracebacks=False).failure
    assert failure is not None
    assert failure.cause is Cause.REFUSED
    return failure.text


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return institution(tmp_path)


def test_an_ask_is_answered_for_one_request_whatever_the_run_is_called(site: Site, tmp_path: Path) -> None:
    first = site.answer(asked(site)).payload
    assert first is not None
    other = "ask 0 of round 1 was answered here for another request.* agree on a plan with another run.seed"
    for place in (site, institution(tmp_path, run="another")):
        again = place.answer(asked(place)).payload
        assert again is not None
        assert again.digest == first.digest
        for request in (asked(place, 1.001), asked(place, step="assess_global")):
            assert re.match(f"RefusedError: {other}", reported(place, request))
    assert institution(tmp_path, small(seed=9), "plan of another seed").answer(asked(site)).failure is None


def test_a_begun_ask_counts_however_it_ended(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Client, "fit", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            site.answer(asked(site))
    resumed = institution(tmp_path)
    assert "answered here for another request" in reported(resumed, asked(resumed, 2.0))
    assert resumed.answer(asked(resumed)).failure is None


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        ({"round": 0}, "'fit' of round 0: the run asks for it in rounds 1 to 2"),
        ({"round": 3}, "'fit' of round 3: the run asks for it in rounds 1 to 2"),
        ({"round": 0, "step": "mask_keys"}, "'mask_keys' of round 0: the run asks for it in rounds 1 to 2"),
        ({"round": 0, "step": "assess_global", "phase": 90}, "'assess_global' of round 0: the run asks for it in"),
        ({"step": "initial", "payload": Payload()}, "'initial' of round 1: .* before its first round"),
        ({"phase": 1}, "ask 1 of round 1: a round asks for 'fit' once, which this client has answered"),
        ({"step": "assess_global", "phase": 91}, "a round asks for 'assess_global' once"),
        ({"step": "assess_global", "phase": 93}, "'assess_global' of round 1 as its ask 93: .* has 3 asks at most"),
        ({"phase": 90}, "'fit' of round 1 as its ask 90: a round of 'fedavg' has 3 asks at most"),
    ],
)
def test_no_ask_beyond_those_of_the_run_is_answered(site: Site, ask: dict[str, Any], reason: str) -> None:
    first = asked(site)
    for request in (first, asked(site, step="assess_global", phase=90)):
        assert site.answer(request).failure is None
    assert site.answer(replace(first, step="initial", round=0, payload=Payload())).failure is None
    assert re.search(reason, reported(site, asked(site, **ask)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda name, weights: {**weights, name: weights[name][:1]}, r"float32 \[1, 32\], expected float32 \[6, 32\]"),
        (lambda name, weights: {**weights, name: weights[name].double()}, r"float64 \[6, 32\], expected float32 \[6"),
        (lambda name, weights: {key: weights[key] for key in weights if key != name}, "no such tensor, expected float"),
        (lambda name, weights: {}, "no such tensor, expected float32"),
        (lambda name, weights: {**weights, f"{name}s": torch.zeros(2)}, r"float32 \[2\], expected no such tensor"),
    ],
    ids=["shape", "type", "missing", "none", "extra"],
)
def test_other_weights_than_a_clients_are_refused_by_name_uncharged(tmp_path: Path, change: Any, reason: str) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    site = institution(tmp_path, small() | NOISE)
    request = asked(site)
    weights = dict(request.payload.bundles["weights"])
    name = next(name for name in weights if name.startswith("heads.") and weights[name].ndim == 2)
    output = reported(site, replace(request, payload=Payload({"weights": Weights(change(name, weights))})))
    assert re.match(f"RefusedError: request field 'weights': first at '({name}s?|encoders.*)': {reason}", output)
    assert site.guard is not None
    assert site.guard.ledger(request.client).entries() == []
    assert not list(tmp_path.rglob(FILE))
    assert site.answer(request).failure is None


def test_noise_is_drawn_once_for_an_ask_for_any_announced_length_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    long, short = (institution(tmp_path, small(rounds=rounds) | NOISE, f"of-{rounds}") for rounds in (2, 1))
    assert long.answer(asked(long)).failure is None
    assert "answered here for another request" in reported(short, asked(short))
    assert long.answer(asked(long)).failure is None


def test_rows_of_another_public_set_are_refused(tmp_path: Path) -> None:
    site = institution(tmp_path, federation_for("creamfl"))
    client = next(iter(site.federation.members))
    rows = Payload({"representations": Representations({"image": torch.zeros(3, 4)}, order="another")})
    output = reported(site, Request(client, "fit", 1, 0, None, rows))
    assert "'representations': representations of another public set or order (another, expected" in output


def test_a_reply_depends_on_more_than_the_request_and_so_does_the_account(tmp_path: Path) -> None:
    """A state that it goes on from, or a rate that follows the number of rounds, which a server chooses."""
    site = institution(tmp_path / "moon", federation_for("moon"))
    for number, after in ((1, None), (2, (1, 0))):
        assert site.answer(asked(site, round=number, after=after)).failure is None
    assert "answered here for another request" in reported(site, asked(site, round=2, after=None))
    config = small()
    config["clients"]["text"]["training"] |= {"schedule": {"kind": "cosine"}}
    for rounds in (2, 1):
        site = institution(tmp_path / "cosine", config, f"of-{rounds}-rounds")
        site.spec = site.spec.model_copy(update={"rounds": rounds + 1})
        assert (site.answer(asked(site, round=2)).failure is None) is (rounds == 2)


def test_a_simulation_keeps_no_account(tmp_path: Path) -> None:
    site = site_of(prepared(small(), tmp_path / "run"))
    assert [site.answer(asked(site, scale)).failure for scale in (1.0, 2.0)] == [None, None]
    assert not list(tmp_path.rglob("*answered*"))
