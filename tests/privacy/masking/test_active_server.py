"""A server that asks clients of a masked sum different things reads nothing of one: no sum opens but the honest one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="cryptography is not installed")

from cryptography.hazmat.primitives.asymmetric import ec

import masked_runs
from polyfed.algorithms.fedavg import FedAvg
from polyfed.core.errors import PolyfedError
from polyfed.engines.local import LocalEngine
from polyfed.engines.outgoing import SiteTerms
from polyfed.privacy.answered import FILE
from polyfed.privacy.masking import mask_keeper
from polyfed.privacy.masking.mask_keeper import KEYS, OPENING, REQUEST, SEALED, SHARES, bytes_bundle, bytes_in
from polyfed.privacy.masking.party import SiteIdentity
from polyfed.privacy.secure_sum import TOTAL
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Cause, Request
from polyfed.wire.payload import Payload, Weights
from polyfed.wire.schema import client_step
from sessions import first_cohort, prepared
from small_federations import plain, sized

CLIENTS = [f"text-{number}" for number in range(4)]
VICTIM = "text-1"
OWN = ec.generate_private_key(ec.SECP384R1())
IDENTITY = SiteIdentity(OWN, dict.fromkeys(CLIENTS, OWN.public_key()))
STEPS = [KEYS, SHARES, "fit", OPENING]
Change = Callable[[Request], Request]


class Twice(FedAvg):
    """Asks for its step twice in each round, the second time from the result of the first."""

    def round(self, server: Any, cohort: Any) -> None:
        super().round(server, cohort)
        super().round(server, cohort)

    @client_step(weights=Weights, num_examples=int, mean_by="num_examples", times=2)
    def fit(self, client: Any, weights: Weights) -> Any:
        return super().fit(client, weights)


def federation(secure: str = "pairwise_masks", method: str = "fedavg") -> Any:
    return sized(masked_runs.federation(secure, len(CLIENTS), method), 80)


def with_fields(request: Request, **fields: Any) -> Request:
    return replace(request, payload=Payload({**request.payload.fields, **fields}))


@dataclass
class Active:
    """An engine whose requests the server changes on their way, and whose answers it may drop."""

    engine: LocalEngine
    change: Change
    lost: frozenset[tuple[str, str]] = frozenset()
    errors: dict[str, str] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)

    def clients(self) -> Any:
        return self.engine.clients()

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for answer in self.engine.exchange([self.change(one) for one in requests], deadline):
            self.errors |= {} if answer.failure is None else {answer.client: answer.failure.text}
            step, is_lost = requests[0].step, (answer.client, requests[0].step) in self.lost
            if step == "fit" and answer.payload is not None and not is_lost:
                self.sent.add(answer.client)
            yield Answer.failed(answer.client, Cause.LOST, "dropped") if is_lost else answer


def session_in(
    folder: Path,
    change: Change = lambda request: request,
    lost: frozenset[tuple[str, str]] = frozenset(),
    sums: Path | None = None,
    config: Any = None,
    **run: Any,
):
    config = config or federation()
    config["run"] |= run
    session = prepared(config, folder)
    assert isinstance(session.engine, LocalEngine)
    session.engine.site.terms = SiteTerms(private=None if sums is None else sums.parent, identity=IDENTITY)
    engine = Active(session.engine, change, lost)
    session.engine = session.cohorts.engine = engine
    return session, engine


def round_of(session: Any, cohort: Any = None) -> dict[str, torch.Tensor]:
    session.experiment.algorithm.round(session.server, cohort or first_cohort(session))
    (kind,) = session.server.weights
    return dict(session.server.weights[kind])


@cache
def honest(survivors: frozenset[str]) -> dict[str, torch.Tensor]:
    """The mean of these clients, in the clear."""
    with TemporaryDirectory() as folder:
        session = prepared(federation("unmasked"), Path(folder))
        gone = frozenset((name, "fit") for name in CLIENTS if name not in survivors)
        session.engine = session.cohorts.engine = Active(session.engine, lambda request: request, gone)
        return round_of(session)


def equals(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


# ---- the attacks that read a reply exactly while requests were not bound


def total_of(victims: int, others: int) -> Change:
    def change(request: Request) -> Request:
        own = victims if request.client == VICTIM else others
        return with_fields(request, **{TOTAL: own}) if request.step == "fit" else request

    return change


def zeroed(request: Request) -> Request:
    if request.step != "fit" or request.client == VICTIM:
        return request
    weights = {name: torch.zeros_like(value) for name, value in request.payload.bundles["weights"].items()}
    return with_fields(request, weights=Weights(weights))


@pytest.mark.parametrize("change", [total_of(20, 2**31 - 1), zeroed], ids=["totals", "zeroed weights"])
def test_clients_that_are_asked_different_things_send_nothing(tmp_path: Path, change: Change) -> None:
    session, engine = session_in(tmp_path, change)
    with pytest.raises(PolyfedError, match="asks something else than was announced"):
        round_of(session)
    assert set(engine.errors) >= set(CLIENTS) - {VICTIM}


@pytest.mark.parametrize("signed", [True, False])
def test_a_server_that_announces_different_requests_is_refused_by_a_clients_name(tmp_path: Path, signed: bool) -> None:
    """The victim receives another request from the first phase on, so it has no objection itself."""

    def change(request: Request) -> Request:
        if request.client != VICTIM or request.step not in (KEYS, "fit"):
            return request
        if request.step == KEYS:
            return with_fields(request, **{REQUEST: mask_keeper.request_digest("fit", reported.payload)})
        return with_fields(request, **{TOTAL: 20})

    session, engine = session_in(tmp_path, change)
    engine.engine.site.terms = SiteTerms(identity=IDENTITY if signed else None)
    fields = {"weights": session.server.weights_for(session.server.clients[1]), TOTAL: 20}
    reported = Request(VICTIM, "fit", 1, 0, None, Payload(fields))
    with pytest.raises(PolyfedError, match=f"'{VICTIM}'"):
        round_of(session)
    reason = f"keys of '{VICTIM}' are not signed by its site" if signed else f"'{VICTIM}': shares that were not made"
    assert all(reason in engine.errors[name] for name in CLIENTS if name != VICTIM)


# ---- the same ask, for others


def test_an_ask_is_not_answered_again_for_fewer_clients(tmp_path: Path) -> None:
    session, engine = session_in(tmp_path)
    start = copied(session)
    assert equals(round_of(session), honest(frozenset(CLIENTS)))

    def again(lost: set[tuple[str, str]]) -> dict[str, torch.Tensor]:
        engine.lost = frozenset(lost)
        return asked(session, start)

    with pytest.raises(PolyfedError, match=r"was answered here for text-0, text-1, text-2, text-3, not text-0, "):
        again({(VICTIM, KEYS)})
    with pytest.raises(PolyfedError, match=r"was answered here for text-0, text-1, text-2, text-3, not text-0, text-2"):
        again({(VICTIM, "fit")})
    assert equals(again(set()), honest(frozenset(CLIENTS))), "all as it was"
    for name in CLIENTS:  # the operators agree
        (engine.engine.site.store.folder / name / FILE).unlink()
    assert equals(again({(VICTIM, KEYS)}), honest(frozenset(CLIENTS) - {VICTIM}))


Weight = dict[str, dict[str, torch.Tensor]]


def copied(session: Any) -> Weight:
    return {kind: {name: value.clone() for name, value in own.items()} for kind, own in session.server.weights.items()}


def asked(session: Any, start: Weight, scale: float = 1.0, number: int = 1, phase: int = 0) -> dict[str, torch.Tensor]:
    """The mean that an ask opens, from weights that are scaled."""
    session.server.begin(number)
    scaled = {kind: Weights({name: value * scale for name, value in own.items()}) for kind, own in start.items()}
    session.server.weights.update(scaled)
    cohort = session.cohort(number, Ledger())
    cohort.phase = phase
    return round_of(session, cohort)


NEARLY = 1 + 2**-22
LATER: dict[str, tuple[set[tuple[str, str]], float, int, str]] = {
    "as it was": (set(), 1.0, 1, "round asks for 'fit' once"),
    "nearly as it was": (set(), NEARLY, 1, "round asks for 'fit' once"),
    "others": ({(VICTIM, KEYS)}, NEARLY, 1, "answered here for text-0, text-1, text-2, text-3, not text-0, text-2"),
    "the same request of others": ({(VICTIM, KEYS)}, 1.0, 2, "answered here for text-0, .*, not text-0, text-2"),
    "less survivors": ({(VICTIM, "fit")}, NEARLY, 1, "round asks for 'fit' once"),
    "beyond all asks": (set(), NEARLY, 3, "'mask_keys' of round 1 as its ask 3: .* 'fedavg' has 3 asks at most"),
    "before all asks": (set(), NEARLY, -1, "as its ask -1"),
}


@pytest.mark.parametrize(("lost", "scale", "phase", "refusal"), LATER.values(), ids=LATER)
def test_a_later_ask_of_a_round_is_refused(tmp_path: Path, lost: Any, scale: float, phase: int, refusal: str) -> None:
    session, engine = session_in(tmp_path)
    start = copied(session)
    assert equals(asked(session, start), honest(frozenset(CLIENTS)))
    engine.lost = frozenset(lost)
    with pytest.raises(PolyfedError, match=refusal):
        asked(session, start, scale, phase=phase)
    engine.lost = frozenset()
    assert equals(asked(session, start), honest(frozenset(CLIENTS))), "the first ask once more, as it was"


@pytest.mark.parametrize("lost", [None, *((VICTIM, step) for step in STEPS)], ids=str)
def test_a_method_that_asks_twice_gets_its_sums_of_those_who_were_in_the_first(
    tmp_path: Path, lost: tuple[str, str] | None
) -> None:
    """A client lost in the first ask is not asked again; the mean in the clear opens, bit for bit."""
    of_both = []
    for secure in ("unmasked", "pairwise_masks"):
        config = federation(secure, f"{__name__}.Twice")
        gone = frozenset() if lost is None or (secure, lost[1]) == ("unmasked", OPENING) else frozenset({lost})
        gone = frozenset((name, "fit") for name, _ in gone) if secure == "unmasked" else gone
        session, _ = session_in(tmp_path / secure, lost=gone, config=config)
        of_both.append(round_of(session))
    assert equals(*of_both)


@pytest.mark.parametrize("step", [KEYS, "fit"])
def test_a_second_ask_of_a_method_that_asks_twice_is_refused_without_one_client(tmp_path: Path, step: str) -> None:
    session, engine = session_in(tmp_path, config=federation(method=f"{__name__}.Twice"))
    seen: list[str] = []

    def change(request: Request) -> Request:
        seen.append(request.step)
        engine.lost = frozenset({(VICTIM, step)}) if request.phase == 1 else frozenset()
        return request

    engine.change = change
    with pytest.raises(PolyfedError, match=r"ask 1 of round 1 was answered here for text-0, text-1, .*, not text-0, "):
        round_of(session)
    assert seen.count("fit") == len(CLIENTS) * (1 if step == KEYS else 2)


def test_a_client_that_leaves_between_rounds_reveals_its_update(tmp_path: Path, record_property: Any) -> None:
    """A threat that remains: sums of two rounds from nearly the same weights, the second without one client."""
    config = federation()
    config["clients"]["text"]["training"] = plain(0.5, 20)
    session, engine = session_in(tmp_path / "masked", config=config)
    start, sizes = copied(session), {client.id: client.samples for client in session.server.clients}
    of_all = asked(session, start)
    engine.lost = frozenset({(VICTIM, KEYS)})
    of_others = asked(session, start, NEARLY, number=2)
    own = sum(sizes.values()) / sizes[VICTIM]
    read = [own * of_all[name] - (own - 1) * of_others[name] for name in of_all]
    gone = frozenset((name, "fit") for name in CLIENTS if name != VICTIM)
    victim = asked(session_in(tmp_path / "alone", lost=gone, config={**config, "aggregation": {}})[0], start)
    before = torch.cat([value.flatten() for value in next(iter(start.values())).values()])
    guess, update = (torch.cat([value.flatten() for value in weights]) - before for weights in (read, victim.values()))
    error = float((guess - update).norm() / update.norm())
    cosine = float(torch.cosine_similarity(guess, update, dim=0))
    record_property("relative error, cosine", (error, cosine))
    assert error < 0.2
    assert cosine > 0.98


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_second_run_of_another_name_is_not_answered_for_fewer_clients(tmp_path: Path, rounds: int) -> None:
    """Both draw from one seed, so that their replies are the same; fewer rounds, or more, change none."""
    sums = tmp_path / "sums"
    first, _ = session_in(tmp_path / "a", sums=sums)
    of_all = round_of(first)
    again, _ = session_in(tmp_path / "b", sums=sums, rounds=rounds)
    assert equals(round_of(again), of_all), "the same sum once more reveals nothing"
    for number, step in enumerate((KEYS, SHARES, "fit")):
        fewer_run, _ = session_in(tmp_path / f"c-{number}", lost=frozenset({(VICTIM, step)}), sums=sums, rounds=rounds)
        with pytest.raises(PolyfedError, match=r"was answered here for text-0, text-1, .*, not text-0, text-2"):
            round_of(fewer_run)


def test_of_two_runs_at_once_one_alone_gets_its_sum(tmp_path: Path) -> None:
    """Both have keys before either is answered: who is second finds the first on record."""
    one, _ = session_in(tmp_path / "a", sums=tmp_path / "sums")

    def meanwhile(request: Request) -> Request:
        if request.step == "fit" and not engine.sent:
            engine.sent.add("all")
            round_of(one)
        return request

    other, engine = session_in(tmp_path / "b", meanwhile, frozenset({(VICTIM, KEYS)}), sums=tmp_path / "sums")
    with pytest.raises(PolyfedError, match="was answered here for"):
        round_of(other)


def test_a_damaged_record_of_sums_answers_nothing(tmp_path: Path) -> None:
    session, engine = session_in(tmp_path)
    round_of(session)
    (engine.engine.site.store.folder / VICTIM / FILE).write_text("{")
    answer = engine.engine.site.answer(Request(VICTIM, KEYS, 1, 0, None, Payload({REQUEST: "0" * 64})))
    assert f"'{FILE}' is damaged" in str(answer.failure)


# ---- whatever else it does


def scaled(draw: random.Random, request: Request) -> Request:
    weights = dict(request.payload.bundles["weights"])
    name = draw.choice(sorted(weights))
    factor = draw.choice([0.0, 2.0, 1 + 2**-20, -1.0])
    return with_fields(request, weights=Weights({**weights, name: weights[name] * factor}))


Deviation = Callable[[random.Random, Request], Request]
Sent = dict[str, bytes]


def bent(field_name: str, bend: Callable[[random.Random, Sent], Sent]) -> Deviation:
    """With other keys or shares than those of a field."""

    def change(draw: random.Random, request: Request) -> Request:
        values = bend(draw, dict(bytes_in(request.payload, field_name)))
        return with_fields(request, **{field_name: bytes_bundle(values)})

    return change


def fewer(draw: random.Random, values: Sent) -> Sent:
    gone = draw.choice(sorted(values))
    return {name: value for name, value in values.items() if name != gone}


def exchanged(draw: random.Random, values: Sent) -> Sent:
    one, other = draw.choice(sorted(values)), draw.choice(sorted(values))
    return {**values, one: values[other]}


def flipped(draw: random.Random, values: Sent) -> Sent:
    name = draw.choice(sorted(values))
    own = bytearray(values[name])
    own[draw.randrange(len(own))] ^= 1 << draw.randrange(8)
    return {**values, name: bytes(own)}


def set_to(name: str, *values: Any) -> Deviation:
    return lambda draw, request: with_fields(request, **{name: draw.choice(values)})


DEVIATIONS: dict[str, list[Deviation]] = {
    KEYS: [set_to(REQUEST, "0" * 64, "", 1), lambda draw, request: replace(request, round=2)],
    SHARES: [*(bent(KEYS, how) for how in (fewer, exchanged, flipped)), lambda _, request: replace(request, phase=1)],
    "fit": [
        scaled,
        set_to(TOTAL, 1, 20, 79, 81, 2**31 - 1, 2**40, 0, -1),
        *(bent(SEALED, how) for how in (fewer, exchanged, flipped)),
        set_to("extra", 1.0),
        lambda draw, request: replace(request, round=2),
    ],
    OPENING: [bent(OPENING, fewer), lambda _, one: with_fields(one, **{OPENING: bytes_bundle({VICTIM: b"1"})})],
}


def outcome(seed: int, folder: Path) -> tuple[bool, int]:
    """Whether a sum opens against a server that deviates at random, and how many requests it changed.

    It must be the honest sum of those who are in it.
    """
    draw = random.Random(seed)
    victims = set(draw.sample(CLIENTS, draw.randint(1, 3)))
    plans = {step: draw.choice(own) for step, own in DEVIATIONS.items() if draw.random() < 0.4}
    lost = {(draw.choice(CLIENTS), draw.choice(STEPS))} if draw.random() < 0.4 or not plans else set()
    twice, changed = draw.random() < 0.3, 0

    def change(request: Request) -> Request:
        nonlocal changed
        if request.step not in plans or request.client not in victims:
            return request
        changed += 1
        if twice:  # first what it deviates to, then the honest request
            engine.engine.site.answer(plans[request.step](draw, request))
            return request
        return plans[request.step](draw, request)

    session, engine = session_in(folder, change, frozenset(lost))
    start, opened = copied(session), []
    with suppress(PolyfedError):
        opened = [round_of(session)]
        assert equals(opened[0], honest(frozenset(engine.sent))), f"seed {seed}: another sum than the honest one"
    repeats = draw.randint(0, 2)
    for _ in range(repeats):  # nearly the same is asked again, of others
        plans, engine.lost = {}, frozenset({(draw.choice(CLIENTS), draw.choice(STEPS))})
        with suppress(PolyfedError):
            opened.append(asked(session, start, NEARLY, phase=draw.randrange(3)))
    # the same ask may be answered again, as after a lost message: it opens the same sum
    assert all(equals(again, opened[0]) for again in opened), f"seed {seed}: a round with two sums"
    return bool(opened), changed + len(lost) + repeats


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 2_000), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_sum_opens_but_the_honest_one(tmp_path: Path, seeds: range, record_property: Any) -> None:
    outcomes = [outcome(seed, tmp_path / str(seed)) for seed in seeds]
    opened = sum(has_opened for has_opened, _ in outcomes)
    assert 0 < opened < len(outcomes)
    record_property("deviations, rounds, sums opened", (sum(count for _, count in outcomes), len(outcomes), opened))
