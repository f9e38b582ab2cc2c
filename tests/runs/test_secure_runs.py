"""Runs with masked sums: the same bits as in the clear, with clients that drop out at any time; refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from grids import mostly_slow
from masked_runs import Faulty, between, federation, left
from misbehaving import cut_short
from polyfed import Experiment
from polyfed.core.errors import ConfigError, ExchangeError, StepError
from polyfed.privacy.masking.mask_keeper import KEYS, OPENING, SEALED, SHARES, bytes_bundle
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, TensorBundle, Weights
from sessions import first_cohort, prepared, site_of, taught
from small_federations import Config, adapted, tiny_experiment


def weights(config: Config, folder: Path) -> dict[str, bytes]:
    return left(polyfed.run(Experiment.parse(config), folder, quiet=True).folder)


@pytest.mark.parametrize(
    "method",
    [
        *mostly_slow(["fedavg", "fedprox", "moon"], "fedavg"),
        {"name": "fedavg", "averaging": {"name": "by_type", "server_optimizer": "adam"}},
    ],
)
def test_masked_runs_end_in_the_bits_of_unmasked_ones(tmp_path: Path, method: Any) -> None:
    masked, clear = (weights(federation(how, method=method), tmp_path / how) for how in ("pairwise_masks", "unmasked"))
    assert masked == clear


def test_adapters_of_a_sum_are_those_of_all_clients_by_samples(tmp_path: Path) -> None:
    config = adapted(name="fedit")
    config["clients"] = {"paired": config["clients"]["paired"] | {"count": 4}}
    sessions = []
    for how in (None, "pairwise_masks"):
        session = prepared(config | {"aggregation": {"secure": how}}, tmp_path / str(how))
        session.experiment.algorithm.round(session.server, first_cohort(session))
        sessions.append(session)
    (client_type, expected), (_, got) = (next(iter(session.server.weights.items())) for session in sessions)
    assert any("lora" in name for name in expected), client_type
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def representing(secure: Any, method: str) -> Config:
    config = tiny_experiment() | {"aggregation": {"secure": secure}}
    config["algorithm"] = {"name": method, "local_epochs": 1, "teacher": {"weights": "count"}}
    config["clients"] = {name: group | {"count": 3} for name, group in config["clients"].items()}
    config["run"] |= {"rounds": 1}
    return config


@pytest.mark.parametrize("method", ["creamfl", pytest.param("fedmd", marks=pytest.mark.slow)])
def test_means_of_representations_are_those_in_the_clear(tmp_path: Path, method: str) -> None:
    masked, clear = (weights(representing(how, method), tmp_path / how) for how in ("pairwise_masks", "unmasked"))
    assert masked == clear
    plain, secure = (prepared(representing(how, method), tmp_path / str(how)) for how in (None, "pairwise_masks"))
    masked_targets = taught(secure)
    for name, target in taught(plain).items():
        torch.testing.assert_close(masked_targets[name].values, target.values, rtol=0, atol=1e-5)


def one_round(config: Config, folder: Path, **faults: Any) -> tuple[dict[str, torch.Tensor], Faulty]:
    """The global weights after a round, and what crossed."""
    session = prepared(config, folder)
    engine = between(session, **faults)
    session.experiment.algorithm.round(session.server, first_cohort(session))
    (client_type,) = session.server.weights
    return dict(session.server.weights[client_type]), engine


@pytest.mark.parametrize("step", [KEYS, SHARES, "fit", OPENING])
def test_who_drops_out_when_changes_no_more_than_it_must(tmp_path: Path, step: str) -> None:
    masked, _ = one_round(federation(), tmp_path / "a", loses={("text-1", step): "its power failed"})
    # one that is lost at the end has done its part
    plain_lost = {("text-1", "fit"): "its power failed"} if step != OPENING else {}
    plain, _ = one_round(federation("unmasked"), tmp_path / "b", loses=plain_lost)
    # in the clear the total is of all, as it is when keys are lost: shares of weights are the same
    assert all(torch.equal(masked[name], plain[name]) for name in plain)


@pytest.mark.parametrize("liar", ["text-0", "text-2"])
def test_one_whose_reply_is_laid_out_otherwise_is_put_out_whenever_it_replies(tmp_path: Path, liar: str) -> None:
    class Relaid(Faulty):
        def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
            for answer in super().exchange(requests, deadline):
                if answer.client == liar and answer.payload and "layout" in answer.payload.fields:
                    answer = replace(answer, payload=Payload({**answer.payload.fields, "layout": "[]"}))
                yield answer

    config = federation()
    session = prepared(config | {"run": config["run"] | {"on_error": "exclude"}}, tmp_path / "a")
    between(session, Relaid)
    session.experiment.algorithm.round(session.server, cohort := first_cohort(session))
    assert [client.id for client in cohort.clients] == [f"text-{k}" for k in range(4) if f"text-{k}" != liar]
    plain, _ = one_round(federation("unmasked"), tmp_path / "b", loses={(liar, "fit"): "its power failed"})
    (client_type,) = session.server.weights
    assert all(torch.equal(value, plain[name]) for name, value in session.server.weights[client_type].items())


@pytest.mark.parametrize("step", [KEYS, SHARES, "fit", OPENING])
def test_too_few_survivors_stop_the_round_by_name(tmp_path: Path, step: str) -> None:
    lost = {(f"text-{k}", step): "its power failed" for k in (1, 2)}
    with pytest.raises(ExchangeError, match=r"text-1.*(its power failed|are false|threshold)"):
        one_round(federation(), tmp_path, loses=lost)


def test_the_server_gets_nothing_of_a_client_but_words_that_look_random(tmp_path: Path) -> None:
    _, masked = one_round(federation(), tmp_path / "a")
    _, plain = one_round(federation("unmasked"), tmp_path / "b")

    def words(engine: Faulty) -> dict[str, torch.Tensor]:
        payloads = {request.client: answer.payload for request, answer in engine.seen if request.step == "fit"}
        assert all(payload is not None and set(payload.fields) == {"words", "layout"} for payload in payloads.values())
        return {client: payload.bundles["words"]["words"] for client, payload in payloads.items() if payload}

    hidden, clear = words(masked), words(plain)
    for client in clear:
        # values of a small model take few of 32 bits; masked ones take all, evenly
        assert clear[client].abs().double().mean() < 2**27
        assert hidden[client].double().std() == pytest.approx(2**32 / 12**0.5, rel=0.05)
        assert (hidden[client] == clear[client]).double().mean() < 0.01
    assert not torch.equal(sum(hidden.values()), sum(clear.values()))  # own masks are off only with shares


def test_secrets_are_gone_after_the_round_and_never_sent(tmp_path: Path) -> None:
    kept: dict[str, list[str]] = {}
    session = prepared(federation(), tmp_path)

    class Watching(Faulty):
        def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
            for answer in super().exchange(requests, deadline):
                for path in tmp_path.rglob("masks.json"):
                    assert path.stat().st_mode & 0o077 == 0
                    content = json.loads(path.read_text())
                    kept.setdefault(path.parent.name, []).extend(content[key] for key in ("seed", "for_masks"))
                yield answer

    engine = between(session, Watching)
    session.experiment.algorithm.round(session.server, first_cohort(session))
    assert len(kept) == 4
    for path in tmp_path.rglob("masks.json"):  # kept in case the process dies
        assert not any(secret in path.read_text() for own in kept.values() for secret in own if secret)
    bundles = [bundle for _, answer in engine.seen if answer.payload for bundle in answer.payload.bundles.values()]
    sent = b"".join(value.numpy().tobytes() for bundle in bundles for value in bundle.values())
    assert not any(bytes.fromhex(secret) in sent for own in kept.values() for secret in own if secret)


def _with(field_name: str, change: Callable[[Any], dict[str, torch.Tensor]], step: str) -> Any:
    def changed(request: Request) -> Request:
        if (request.step, request.client) != (step, "text-1"):
            return request
        fields = {**request.payload.fields, field_name: TensorBundle(change(dict(request.payload.bundles[field_name])))}
        return replace(request, payload=Payload(fields))

    return changed


def _swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = list(tensors)
    return {**tensors, names[0]: tensors[names[1]], names[1]: tensors[names[0]]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (_with(SEALED, _swapped, "fit"), "shares that were not made for this client and request"),
        (_with(SEALED, lambda own: dict(list(own.items())[:1]), "fit"), "unmasking takes 3"),
        (_with(KEYS, lambda own: {**own, "text-1": own["text-0"]}, SHARES), "own keys"),
        (_with(KEYS, lambda own: dict(list(own.items())[:2]), SHARES), "a sum of 2 clients"),
        (_with(OPENING, lambda own: {"text-1": own["text-1"]}, OPENING), "unmasking takes 3"),
    ],
)
def test_clients_refuse_what_would_unmask_them(tmp_path: Path, changes: Any, reason: str) -> None:
    _, engine = one_round(federation(), tmp_path, changes=changes)
    errors = [answer.failure.text for request, answer in engine.seen if request.client == "text-1" and answer.failure]
    assert errors
    assert reason in errors[0]


def test_a_client_that_is_asked_again_gives_the_same_words_and_no_others(tmp_path: Path) -> None:
    session = prepared(federation(), tmp_path)
    site = site_of(session)
    again: list[str] = []

    def other(request: Request) -> Request:
        payload = request.payload
        if request.step == "fit":
            weights = Weights({name: value * 2 for name, value in payload.bundles["weights"].items()})
            payload = Payload({**payload.fields, "weights": weights})
        if request.step == OPENING:
            others = [name for name in payload.bundles[OPENING] if name != request.client]
            payload = Payload({OPENING: bytes_bundle(dict.fromkeys((request.client, *others[1:]), b"1"))})
        return replace(request, payload=payload)

    class Twice(Faulty):
        def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
            for answer, request in zip(super().exchange(requests, deadline), requests, strict=True):
                if request.step in ("fit", OPENING) and answer.payload:
                    assert site.handle(request).digest == answer.payload.digest
                yield answer
                if request.step in ("fit", OPENING):
                    again.append(str(site.answer(other(request)).failure))

    between(session, Twice)
    session.experiment.algorithm.round(session.server, first_cohort(session))
    assert len(again) == 8
    assert ["asks something else than was announced" in reason for reason in again] == [True] * 4 + [False] * 4
    assert all("was answered here for" in reason for reason in again[4:])


def test_a_round_that_was_cut_short_begins_with_new_keys_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    config = federation(rounds=3)
    complete = polyfed.run(Experiment.parse(config), tmp_path / "complete", quiet=True)
    assert left(polyfed.resume(cut_short(config, tmp_path / "cut"), quiet=True).folder) == left(complete.folder)


def test_values_beyond_the_range_put_a_client_out_by_name(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"'text-0', .*does not fit 32 bits of range 0.001; raise"):
        one_round(federation({"name": "pairwise_masks", "range": 0.001}), tmp_path)


def test_noise_goes_under_the_masks(tmp_path: Path) -> None:
    """Differential privacy comes first: what is masked has its noise, and a repeated round costs nothing twice."""
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    (secret := tmp_path / "secret").write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    privacy = {"reply": {"weights": 1.0, "noise_multiplier": 4.0}, "metrics": "clear", "secret": str(secret)}
    masked, clear, quiet = (
        polyfed.run(
            Experiment.parse(federation(how) | ({"privacy": privacy} if noise else {})), tmp_path / name, quiet=True
        )
        for name, how, noise in (("a", "pairwise_masks", True), ("b", "unmasked", True), ("c", "unmasked", False))
    )
    assert left(masked.folder) == left(clear.folder)
    assert left(masked.folder) != left(quiet.folder)
    spent = [run.records.last("server", "privacy")["epsilon"] for run in (masked, clear)]
    assert spent[0] == spent[1] > 0


def test_masks_without_ciphers_are_refused_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.privacy.secure_sum.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package 'cryptography'.*pip install \"polyfed\[deploy\]\""):
        polyfed.run(Experiment.parse(federation()), tmp_path / "run", quiet=True)
