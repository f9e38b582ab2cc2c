"""Sites: what a request may ask for, what is kept, and the content of an answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_steps import Odd

from polyfed.core.errors import ConfigError, DataError, PayloadError, RunError
from polyfed.engines.run_spec import RunSpec
from polyfed.engines.site import Site
from polyfed.runs.experiment import Experiment
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Request, StateVersion
from polyfed.wire.payload import Payload, Weights
from sessions import prepared, site_of

Config = dict[str, Any]


@pytest.fixture
def odd(tiny: Config) -> Config:
    tiny["algorithm"] = f"{Odd.__module__}.Odd"
    return tiny


@pytest.fixture
def site(odd: Config, tmp_path: Path) -> Site:
    return site_of(prepared(odd, tmp_path / "run"))


def asked(
    step: str, label: StateVersion = (1, 0), after: StateVersion | None = None, /, client: str = "image", **fields: Any
) -> Request:
    return Request(client, step, *label, after, Payload(fields))


# ---- requests


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asked("cuont"), r"'cuont' is not a client step of '.*Odd'; valid: assess, .*count, diverge, .*initial, peek"),
        (asked("_more"), "'_more' is not a client step"),
        (asked("round"), "'round' is not a client step"),
        (asked("__init__"), "'__init__' is not a client step"),
        (asked("count", client="stranger"), "'stranger' does not live here; there are: paired-0, paired-1, image"),
        (asked("count", by="two"), "request field 'by' is str, declared is int"),
        (asked("count", by=True), "request field 'by' is bool, declared is int"),
        (asked("count", more=1), r"request has an undeclared field 'more' \(int\); declared: by"),
        (asked("diverge"), r"request lacks 'weights' \(weights\)"),
        (asked("diverge", weights=Weights({"w": torch.tensor(float("nan"))})), "tensor 'w' has NaN or infinite"),
        (asked("diverge", weights=Weights({"w": torch.tensor(1e7)})), r"norm 1e\+07, the limit is 1e\+06"),
    ],
)
def test_what_may_not_be_asked_is_refused_and_changes_nothing(site: Site, request_: Request, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        site.handle(request_)
    assert site.store.versions(request_.client) == []


def test_limits_are_those_of_the_place(odd: Config, tmp_path: Path) -> None:
    session = prepared(odd, tmp_path / "run")
    settings, spec = session.experiment.site(), session.hosting.spec
    strict = Site.open(settings, spec, tmp_path, vocabulary=tmp_path, limits=Limits(tensor_norm=1.0))
    with pytest.raises(PayloadError, match="norm 2, the limit is 1"):
        strict.handle(asked("diverge", weights=Weights({"w": torch.tensor(2.0)})))


# ---- what is kept


def test_values_last_as_long_as_they_are_declared_to(site: Site) -> None:
    first = site.handle(asked("count")).scalars
    second = site.handle(asked("count", (1, 1), (1, 0))).scalars
    third = site.handle(asked("count", (2, 0), (1, 1), by=5)).scalars
    assert [reply["count"] for reply in (first, second, third)] == [1, 2, 7]
    assert [reply["round"] for reply in (first, second, third)] == [1, 2, 5]


def test_a_step_that_is_asked_for_again_starts_from_the_same_place(site: Site) -> None:
    site.handle(asked("count"))
    assert [site.handle(asked("count", (2, 0), (1, 0))).scalars["count"] for _ in range(3)] == [2, 2, 2]
    assert site.handle(asked("count", (3, 0), (2, 0))).scalars["count"] == 3


def test_a_step_after_a_refused_one_starts_from_before_it(site: Site) -> None:
    site.handle(asked("count"))
    site.handle(asked("count", (2, 0), (1, 0), by=50))  # the server does not accept the reply
    assert site.handle(asked("count", (3, 0), (1, 0))).scalars["count"] == 2


def test_a_query_sees_what_is_kept_and_changes_nothing(site: Site) -> None:
    site.handle(asked("count"))
    assert [site.handle(asked("peek", (1, 90), (1, 0))).scalars["count"] for _ in range(2)] == [101, 101]
    assert site.store.versions("image") == [(1, 0)]
    assert site.handle(asked("count", (2, 0), (1, 0))).scalars["count"] == 2


@pytest.mark.parametrize("step", ["fail", "diverge"])
def test_a_step_that_fails_changes_nothing(site: Site, step: str) -> None:
    site.handle(asked("count"))
    fields = {"weights": Weights({"w": torch.ones(2)})} if step == "diverge" else {}
    with pytest.raises((ZeroDivisionError, PayloadError)):
        site.handle(asked(step, (2, 0), (1, 0), **fields))
    assert site.store.versions("image") == [(1, 0)]
    assert site.handle(asked("count", (2, 0), (1, 0))).scalars["count"] == 2


def test_clients_keep_apart(site: Site) -> None:
    site.handle(asked("count", by=7))
    assert site.handle(asked("count", client="paired-0")).scalars["count"] == 1


def test_a_client_whose_state_is_gone_does_not_start_afresh(site: Site) -> None:
    for label in ((2, 0), (3, 1)):
        with pytest.raises(RunError, match=f"client 'image' after round {label[0]}, phase {label[1]} is not here"):
            site.handle(asked("count", (4, 0), label))
    answer = site.answer(asked("count", (2, 0), (1, 1)))
    assert answer.payload is None
    assert answer.failure is not None
    assert answer.failure.text.startswith("RunError: state of client 'image' after round 1, phase 1 is not here")


def test_a_method_that_keeps_nothing_needs_no_state(tiny: Config, tmp_path: Path) -> None:
    session = prepared(tiny, tmp_path / "run")
    sent = Payload({"weights": session.server.weights_for(session.server.clients[2])})
    site_of(session).handle(Request("image", "fit", 5, 0, (4, 0), sent))
    assert not (tmp_path / "run" / "checkpoints").exists()


# ---- answers


def test_an_answer_describes_the_error_in_a_line_and_in_detail(site: Site) -> None:
    answer = site.answer(asked("fail"))
    assert answer.failure is not None
    assert (answer.client, answer.payload, answer.failure.text) == ("image", None, "ZeroDivisionError: halfway")
    assert answer.failure.details.startswith("Traceback (most recent call last):")
    assert 'raise ZeroDivisionError("halfway")' in answer.failure.details


def test_details_can_be_kept_at_home(site: Site) -> None:
    answer = site.answer(asked("fail"), tracebacks=False)
    assert answer.failure is not None
    assert answer.failure.details == ""
    assert re.fullmatch(r"ZeroDivisionError: error [0-9a-f]{8} in the site's log", str(answer.failure.text))


@pytest.mark.parametrize("after", [None, (1, 0)])
def test_initial_weights_are_those_of_a_fresh_client(tiny: Config, tmp_path: Path, after: StateVersion | None) -> None:
    """Whatever it has learnt since: a server may ask again after it lost what it knew."""
    tiny["algorithm"] = {"name": "local", "local_epochs": 1}
    site = site_of(prepared(tiny, tmp_path / "run"))
    site.handle(asked("fit"))
    reply = site.handle(asked("initial", (2, 0), after))
    fresh = site.federation.client_model(site.federation.members["image"]).state_dict()
    assert reply.bundles["weights"].keys() == fresh.keys()
    assert all(torch.equal(value, fresh[name]) for name, value in reply.bundles["weights"].items())


# ---- opening


def test_a_place_with_another_public_set_is_refused(tiny: Config, tmp_path: Path) -> None:
    experiment = Experiment.parse(tiny)
    order = prepared(tiny, tmp_path / "a").federation.public_order
    Site.open(experiment.site(), experiment.spec("r", order), tmp_path / "s", vocabulary=tmp_path / "v")
    other = Experiment.parse(tiny | {"public": {"source": "scenes", "items": 15}})
    with pytest.raises(DataError, match=rf"public set here differs \(\w+, expected {order}\): compare source"):
        Site.open(other.site(), experiment.spec("r", order), tmp_path / "s", vocabulary=tmp_path / "v")
    none = Experiment.parse({key: value for key, value in tiny.items() if key != "public"})
    with pytest.raises(DataError, match=rf"\(none, expected {order}\)"):
        Site.open(none.site(), experiment.spec("r", order), tmp_path / "s", vocabulary=tmp_path / "v")


def test_a_place_that_does_not_attack_refuses_a_run_with_attackers(tiny: Config, tmp_path: Path) -> None:
    tiny["run"]["attackers"] = "sign_flip"
    experiment = Experiment.parse(tiny)
    with pytest.raises(ConfigError, match="clients of this site do not attack"):
        Site.open(experiment.site(), experiment.spec("r", ""), tmp_path / "s", vocabulary=tmp_path / "v")


def test_a_place_may_host_some_of_the_clients(odd: Config, tmp_path: Path) -> None:
    """A client and its data depend only on its group, not on other clients of the site."""
    undisturbed_run = site_of(prepared(odd, tmp_path / "a"))
    part = Experiment.parse(odd | {"clients": {"image": odd["clients"]["image"]}})
    alone = Site.open(part.site(), undisturbed_run.spec, tmp_path / "s", vocabulary=tmp_path / "v")
    assert [info.id for info in alone.infos] == ["image"]
    assert alone.infos[0] == undisturbed_run.infos[2]
    assert torch.equal(alone.federation.members["image"].items, undisturbed_run.federation.members["image"].items)
    with pytest.raises(PayloadError, match="client 'paired-0' does not live here; there are: image"):
        alone.handle(asked("count", client="paired-0"))


def test_the_card_of_a_run_crosses_as_json(odd: Config) -> None:
    experiment = Experiment.parse(odd)
    spec = experiment.spec("some-run", "order")
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    assert isinstance(spec.algorithm, Odd)
    assert (spec.run, spec.seed, spec.rounds) == ("some-run", experiment.run.seed, experiment.run.rounds)
