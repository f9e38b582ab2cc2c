"""Protected clients whose steps fail: nothing shows it, it costs as much, and the client goes on as before."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

import misbehaving
from polyfed.core.errors import DataError
from polyfed.data.samples import Inputs
from polyfed.engines.site import Site
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Weights
from sessions import asked, prepared, site_of
from small_federations import Config, federation_for, topics

CLIPS = {"weights": 1.0, "representations": 1.0, "logits": 1.0}
FAST = ("fedavg", "fedmd")
SLOW = ["change_distillation", "creamfl", "creamfl_averaged", "fedafd", "fedcola", "fedet", "fedgems", "fediot"]
SLOW += ["fedmkd", "fedprox", "margin_weighted", "moon"]


@dataclass
class Unreadable:
    """Inputs of which one row cannot be read, or all but the first."""

    inputs: Inputs
    row: int | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        if bool((rows > 0 if self.row is None else rows == self.row).any()):
            raise DataError("patient 17 has no image")
        return self.inputs(rows, generator)


def break_data(site: Site) -> None:
    """Let every client's training samples fail but one."""
    broken = {}
    for member in site.federation.members.values():
        data = site.data_of(member)
        train = replace(data.train, inputs={name: Unreadable(inputs) for name, inputs in data.train.inputs.items()})
        broken[member.id] = replace(data, train=train)
    site.data_of = lambda member: broken[member.id]  # type: ignore[method-assign]


def federation(method: str, **reply: Any) -> Config:
    config = federation_for(method)
    config["run"] = config["run"] | {"on_error": "exclude"}
    config["privacy"] = {"reply": CLIPS | {"noise_multiplier": 3.0} | reply, "metrics": "clear"}
    return config


def answered(session: Session, monkeypatch: pytest.MonkeyPatch, rounds: int = 2) -> list[tuple[Request, Answer]]:
    """All requests and answers of some rounds."""
    seen: list[tuple[Request, Answer]] = []
    honest = Site.answer

    def noting(self: Site, request: Request, **more: Any) -> Answer:
        seen.append((request, honest(self, request, **more)))
        return seen[-1][1]

    with monkeypatch.context() as patched:
        patched.setattr(Site, "answer", noting)
        for number in range(1, rounds + 1):
            session.server.begin(number)
            session.experiment.algorithm.round(session.server, session.cohort(number, Ledger()))
    return seen


def layout(payload: Payload | None) -> dict[str, Any]:
    assert payload is not None
    tensors = {field: bundle.specs for field, bundle in payload.bundles.items()}
    return tensors | {name: payload.scalars[name] for name in payload.scalars}


def charges(folder: Path, client: str) -> int:
    lines = (folder / ".privacy" / f"{client}.jsonl").read_text().splitlines()
    return sum(json.loads(line)["cost"] is not None for line in lines)


@pytest.mark.parametrize("method", [*FAST, *(pytest.param(method, marks=pytest.mark.slow) for method in SLOW)])
def test_a_failing_step_is_answered_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    sessions = [prepared(federation(method), tmp_path / name) for name in ("well", "ill")]
    break_data(site_of(sessions[1]))
    well, ill = (answered(session, monkeypatch) for session in sessions)
    assert len(well) == len(ill) > 2
    for (request, answer), (_, other) in zip(well, ill, strict=True):
        assert answer.failure is None
        assert other.failure is None
        if request.round == 1:  # later ones are asked with what the server made of the first
            assert layout(answer.payload) == layout(other.payload), request.step
    for client in {request.client for request, answer in well if answer.payload is not None and answer.payload.fields}:
        assert charges(tmp_path / "ill", client) == charges(tmp_path / "well", client) > 0


# ---- one client, one request


def protected(folder: Path, **privacy: Any) -> Site:
    """A site whose clients classify texts, protected in this way."""
    config = topics(name="fedavg")
    config["data"]["sources"]["texts"] |= {"train": 120, "test": 60}
    config["run"] |= {"on_error": "exclude", "rounds": 3}
    config["privacy"] = privacy | {"metrics": "clear"}
    return site_of(prepared(config, folder / "run"))


def spent(site: Site) -> int:
    assert site.guard is not None
    return len(site.guard.ledger("text-0").costs())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return protected(tmp_path, reply={"weights": 1.0, "noise_multiplier": 4.0})


def change(request: Request, answer: Answer) -> Tensor:
    assert answer.payload is not None, answer.failure
    sent, made = request.payload.bundles["weights"], answer.payload.bundles["weights"]
    return torch.cat([(made[name] - sent[name]).flatten() for name in sent]).double()


raising = misbehaving.raising(ValueError("patient 17 has a label that is unknown"))


def diverging(client: Any, *_: Any, **__: Any) -> None:
    next(client.model.parameters()).data.fill_(float("inf"))


def growing(client: Any, *_: Any, **__: Any) -> None:
    next(client.model.parameters()).data.fill_(1e7)  # beyond run.exchange.limits


@pytest.mark.parametrize("train", [raising, diverging, growing])
def test_failures_leave_as_noise_on_what_was_received(site: Site, monkeypatch: pytest.MonkeyPatch, train: Any) -> None:
    monkeypatch.setattr("polyfed.federation.client.Client.fit", train)
    request = asked(site)
    first, again = site.answer(request), site.answer(request)
    noise = change(request, first)
    assert torch.equal(noise, change(request, again))
    assert float(noise.std()) == pytest.approx(4.0, rel=0.1)
    assert abs(float(noise.mean())) < 5 * 4.0 / len(noise) ** 0.5
    assert first.payload is not None
    assert first.payload.scalars == {"num_examples": 60}
    assert spent(site) == 1


@pytest.mark.parametrize("lost", ["num_examples", "weights", "a tensor"])
def test_an_incomplete_reply_is_protected_too(site: Site, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    honest = Site.perform

    def losing(self: Site, *arguments: Any, **more: Any) -> Payload:
        fields = dict(honest(self, *arguments, **more).fields)
        if lost == "a tensor":
            fields["weights"] = Weights(dict(list(fields["weights"].items())[1:]))  # type: ignore[union-attr]
        fields.pop(lost, None)
        return Payload(fields)

    expected = layout(site.answer(asked(site)).payload)
    monkeypatch.setattr(Site, "perform", losing)
    assert layout(site.answer(asked(site, phase=1)).payload) == expected


def test_weights_that_make_a_client_fail_do_not_show_its_classes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the head so long that a step which touches it goes beyond the limits."""
    request = asked(site)
    name, head = list(request.payload.bundles["weights"].items())[-2]
    answers = []
    for number in range(len(head)):
        crafted = head.clone()
        crafted[number] = 9.99e5 / head.shape[1] ** 0.5
        weights = Weights({**request.payload.bundles["weights"], name: crafted})
        answers.append(site.answer(replace(request, payload=Payload({"weights": weights}))))
    assert {answer.failure for answer in answers} == {None}
    assert spent(site) == len(head)


def test_steps_that_fail_spend_the_budget(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.federation.client.Client.fit", raising)
    assert site.guard is not None
    site.guard = replace(site.guard, site_budget=site.guard.settings.budget.model_copy(update={"epsilon": 3.0}))
    errors = [site.answer(asked(site, round=number)).failure for number in (1, 2, 3)]
    assert errors[:2] == [None, None]
    assert str(errors[2]).startswith("BudgetError: client 'text-0' has spent its privacy budget: 2 replies")


def test_a_kill_after_the_charge_gives_the_same_answer_for_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("polyfed.federation.client.Client.fit", misbehaving.raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            site.answer(asked(site))
    assert site.guard is not None
    ledger = site.guard.ledger("text-0")
    (charged,) = ledger.entries()
    assert charged.reply == ""
    first = change(asked(site), site.answer(asked(site)))
    assert [entry.cost is None for entry in ledger.entries()] == [False, True]
    assert torch.equal(first, change(asked(site), site.answer(asked(site))))
    assert ledger.costs() == [charged.cost]


def test_another_answer_to_the_same_request_costs_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first = change(asked(site), site.answer(asked(site)))
    monkeypatch.setattr("polyfed.federation.client.Client.fit", raising)
    assert abs(float(torch.corrcoef(torch.stack([first, change(asked(site), site.answer(asked(site)))]))[0, 1])) < 0.05
    assert spent(site) == 2


def test_what_cannot_be_written_down_does_not_leave(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.pwrite", misbehaving.raising(OSError(28, "No space left on device")))
    for number in range(1, 4):
        assert site.answer(asked(site, round=number)).payload is None


def test_a_ledger_that_is_gone_stops_its_client(site: Site, tmp_path: Path) -> None:
    assert site.answer(asked(site)).failure is None
    (tmp_path / "run" / ".privacy" / "text-0.jsonl").unlink()
    error = site.answer(asked(site, round=2)).failure
    assert error is not None
    assert error.text.startswith("DataError: ")
    assert "lacks the last that 'text-0.head' has" in error.text


# ---- what is kept


def test_a_state_records_the_requests_that_led_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a request that was put again after another history would be answered alike if, and only if, that changed
    nothing, which reveals the data."""
    session = prepared(federation("moon"), tmp_path / "run")
    site, client = site_of(session), session.server.clients[0].id
    assert site.guard is not None
    fits = [request for request, _ in answered(session, monkeypatch) if request.client == client]
    first, second = fits[0], fits[-1]
    ledger = site.guard.ledger(client)
    before = len(ledger.costs())
    assert site.answer(second).failure is None
    assert len(ledger.costs()) == before
    moved = {name: value + 1e-3 for name, value in first.payload.bundles["weights"].items()}
    with monkeypatch.context() as patched:
        patched.setattr("polyfed.federation.client.Client.fit", raising)  # so that the client keeps nothing else of it
        site.answer(replace(first, payload=Payload({"weights": Weights(moved)})))
    site.answer(second)
    assert len(ledger.costs()) == before + 2


def test_a_client_that_fails_goes_on_from_what_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = prepared(federation("fedmd"), tmp_path / "run")
    site, client = site_of(session), session.server.clients[0].id
    tell, learn = [request for request, _ in answered(session, monkeypatch, rounds=1) if request.client == client]
    kept = dict(site.store.load(client, (tell.round, tell.phase)))
    break_data(site)
    answer = site.answer(learn)
    assert (answer.failure, answer.payload and dict(answer.payload.fields)) == (None, {})
    now = site.store.load(client, (learn.round, learn.phase))
    assert now.keys() == kept.keys()
    assert {name for name in kept if not torch.equal(now[name], kept[name])} == {".left/by"}
    assert site.answer(replace(tell, round=2, phase=0, after=(learn.round, learn.phase))).failure is None


# ---- DP-SGD


@pytest.fixture
def sampled(tmp_path: Path) -> Site:
    pytest.importorskip("opacus", reason="opacus is not installed")
    return protected(tmp_path, samples={"noise_multiplier": 1.2, "clip": 0.5})


def test_unreadable_samples_count_for_nothing_and_others_do(sampled: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyfed.privacy import private_training

    sums: list[Tensor] = []
    honest = private_training.PerSampleGradients.clipped_sums

    def noting(self: Any, index: Tensor, stream: torch.Generator) -> Any:
        made = list(honest(self, index, stream))
        sums.append(torch.cat([total.flatten().clone() for _, total in made]))
        return iter(made)

    monkeypatch.setattr(private_training.PerSampleGradients, "clipped_sums", noting)
    data = sampled.data_of(sampled.federation.members["text-0"])
    one_is_lost = Unreadable(data.train.inputs["text"], int(data.train.rows["text"][5]))

    def reading(inputs: Unreadable) -> None:
        made = replace(data, train=replace(data.train, inputs={"text": inputs}))
        monkeypatch.setattr(sampled, "data_of", lambda member: made)

    reading(one_is_lost)
    assert sampled.answer(asked(sampled)).failure is None
    assert all(float(total.norm()) > 0.5 for total in sums)  # more than one sample can add
    del sums[:]
    reading(Unreadable(one_is_lost))
    assert sampled.answer(asked(sampled, round=2)).failure is None
    assert all(float(total.norm()) <= 0.5 + 1e-6 for total in sums)


def test_a_gradient_that_is_not_finite_is_none(sampled: Site) -> None:
    from polyfed.privacy.private_training import finite_gradients

    gradients = {"a": torch.ones(3, 2, 2), "b": torch.ones(3)}
    gradients["a"][1, 0, 1], gradients["b"][2] = float("nan"), float("inf")
    made = finite_gradients(gradients)
    assert made["a"].flatten(1).tolist() == [[1.0] * 4, [0.0] * 4, [0.0] * 4]
    assert made["b"].tolist() == [1.0, 0.0, 0.0]


def test_a_step_of_training_that_fails_has_learnt_noise(sampled: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Site.perform

    def failing(self: Site, *arguments: Any, blank: bool = False, **more: Any) -> Payload:
        if not blank:
            raising()
        return honest(self, *arguments, blank=blank, **more)

    monkeypatch.setattr(Site, "perform", failing)
    request = asked(sampled)
    assert float(change(request, sampled.answer(request)).std()) > 0
    assert spent(sampled) == 1


def test_failures_of_blank_samples_too_are_reported_and_cost(sampled: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.federation.client.Client.fit", raising)
    answer = sampled.answer(asked(sampled))
    assert answer.failure is not None
    assert answer.failure.text == "PayloadError: step 'fit' failed; a protected client does not disclose the cause"
    assert "patient" not in answer.failure.details
    assert spent(sampled) == 1
