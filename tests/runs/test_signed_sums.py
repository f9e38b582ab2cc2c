"""Masked sums of clients whose sites sign their keys: a server that sends keys of its own is found out by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="cryptography is not installed")

from cryptography.hazmat.primitives.asymmetric import ec
from test_secure_runs import Faulty, between, federation

from polyfed.core.errors import ExchangeError, PayloadError
from polyfed.engines.outgoing import SiteTerms
from polyfed.privacy.masking import mask_keeper
from polyfed.privacy.masking.mask_keeper import KEYS, REQUEST, SEALED, SHARES, SIGNED, bytes_bundle, bytes_in
from polyfed.privacy.masking.party import Party, SiteIdentity, Unmasking, context_of
from polyfed.privacy.secure_sum import TOTAL, Residues, SummedReply, total
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, Weights
from sessions import first_cohort, prepared, site_of

CLIENTS = [f"text-{number}" for number in range(4)]
NEW = ec.generate_private_key(ec.SECP384R1())
OWN = ec.generate_private_key(ec.SECP384R1())
IDENTITY = SiteIdentity(OWN, dict.fromkeys(CLIENTS, OWN.public_key()))
Tamper = Callable[[dict[str, bytes], dict[str, bytes], Request], tuple[dict[str, bytes], dict[str, bytes]]]


def one_round(folder: Path, identity: SiteIdentity | None, tamper: Tamper | None = None) -> Any:
    """A round of four clients of a site, whose server changes keys or signatures on their way to ``text-1``."""
    session = prepared(federation(), folder)
    site_of(session).terms = SiteTerms(identity=identity)

    def changed(request: Request) -> Request:
        if (request.step, request.client) != (SHARES, "text-1") or tamper is None:
            return request
        signed = bytes_in(request.payload, SIGNED) if SIGNED in request.payload.fields else {}
        keys, signatures = tamper(bytes_in(request.payload, KEYS), signed, request)
        return replace(request, payload=Payload({KEYS: bytes_bundle(keys), SIGNED: bytes_bundle(signatures)}))

    engine = between(session, changes=changed)
    session.experiment.algorithm.round(session.server, first_cohort(session))
    return session, engine


def errors_of(engine: Faulty, client: str) -> list[str]:
    return [answer.failure.text for request, answer in engine.seen if request.client == client and answer.failure]


def weights_of(session: Any) -> dict[str, torch.Tensor]:
    (variant,) = session.server.weights
    return dict(session.server.weights[variant])


def test_signed_sums_are_those_of_unsigned_ones(tmp_path: Path) -> None:
    signed, _ = one_round(tmp_path / "a", IDENTITY)
    unsigned, _ = one_round(tmp_path / "b", None)
    alone, _ = one_round(tmp_path / "c", SiteIdentity(OWN))  # signs for those who have a roster, and trusts any site
    for other in (unsigned, alone):
        assert all(torch.equal(value, weights_of(other)[name]) for name, value in weights_of(signed).items())


def played_by_the_server(request: Request, name: str) -> tuple[Party, bytes]:
    """A party that the server invents, and its signature with a key that the server has."""
    context = context_of("run", request.round, request.phase)
    forged = Party(name, context)
    return forged, SiteIdentity(NEW).signature(name, context, forged.public)


def substituted(keys: dict[str, bytes], signatures: dict[str, bytes], request: Request) -> Any:
    forged, signature = played_by_the_server(request, "text-2")
    return keys | {"text-2": forged.public}, signatures | {"text-2": signature}


def under_the_old_signature(keys: dict[str, bytes], signatures: dict[str, bytes], request: Request) -> Any:
    return keys | {"text-2": played_by_the_server(request, "text-2")[0].public}, signatures


def unsigned(keys: dict[str, bytes], signatures: dict[str, bytes], request: Request) -> Any:
    return keys, {name: value for name, value in signatures.items() if name != "text-2"}


def swapped(keys: dict[str, bytes], signatures: dict[str, bytes], request: Request) -> Any:
    """Another client's keys with that client's own signature, of the same site."""
    return keys | {"text-2": keys["text-3"]}, signatures | {"text-2": signatures["text-3"]}


def one_byte(keys: dict[str, bytes], signatures: dict[str, bytes], request: Request) -> Any:
    """The commitment alone is another's: with it a false share would pass for a right one."""
    return keys | {"text-2": keys["text-2"][:-1] + bytes([keys["text-2"][-1] ^ 1])}, signatures


def invented(keys: dict[str, bytes], signatures: dict[str, bytes], request: Request) -> Any:
    forged, signature = played_by_the_server(request, "text-9")
    return keys | {"text-9": forged.public}, signatures | {"text-9": signature}


NOT_SIGNED = "keys of 'text-2' are not signed by its site for this round"


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        *((tamper, NOT_SIGNED) for tamper in (substituted, under_the_old_signature, swapped, one_byte)),
        (unsigned, "keys of 'text-2' are not signed, and this site has a roster"),
        (invented, "keys of 'text-9', whose site has no key on this site's roster"),
    ],
)
def test_keys_that_the_server_changes_are_found_out_by_name(tmp_path: Path, tamper: Tamper, reason: str) -> None:
    _, engine = one_round(tmp_path, IDENTITY, tamper)
    assert [reason in error for error in errors_of(engine, "text-1")] == [True]
    assert ("fit", "text-1") not in [(request.step, request.client) for request, _ in engine.seen], "it sends nothing"


def read_by_a_server_that_plays_all_others(site: Any, weights: Weights, run: str) -> Residues:
    """Reply of ``text-1`` without a mask."""
    asked_for = Payload({"weights": weights, TOTAL: 240})
    digest = mask_keeper.request_digest("fit", asked_for)
    needed, context = site.spec.secure.required, context_of(run, 1, 0, digest)

    def asked(step: str, **fields: Any) -> Payload:
        reply: Payload = site.handle(Request("text-1", step, 1, 0, None, Payload(fields)))
        return reply

    forged = {name: Party(name, context) for name in CLIENTS if name != "text-1"}
    public = {name: party.public for name, party in forged.items()} | bytes_in(asked(KEYS, **{REQUEST: digest}), KEYS)
    signed = {name: SiteIdentity(NEW).signature(name, context, public[name]) for name in CLIENTS}
    fields = {KEYS: bytes_bundle(public), SIGNED: bytes_bundle(signed)}
    sealed = {"text-1": bytes_in(asked(SHARES, **fields), SEALED)}
    sealed |= {name: party.shares(public, needed) for name, party in forged.items()}
    for_client = bytes_bundle({name: shares["text-1"] for name, shares in sealed.items() if name != "text-1"})
    words = SummedReply.received(asked("fit", **asked_for.fields, **{SEALED: for_client}), site.spec.secure.numbers)
    sent, shares = [words.words], {}
    for name, party in forged.items():
        party.receive({other: made[name] for other, made in sealed.items() if other != name}, needed)
        sent.append(party.masked(words.words * 0))
        shares[name] = party.opened(CLIENTS, needed)
    return Unmasking(context, public, CLIENTS, needed(4)).sum(total(sent), CLIENTS, shares)


def test_a_server_that_plays_all_others_reads_a_reply_unless_there_is_a_roster(tmp_path: Path) -> None:
    session = prepared(federation(), tmp_path)
    site = site_of(session)
    run = site.spec.fingerprint
    weights = session.server.weights_for(session.server.clients[1])
    stolen = read_by_a_server_that_plays_all_others(site, weights, run)
    plain = prepared(federation("unmasked"), tmp_path / "plain")
    request = Request("text-1", "fit", 1, 0, None, Payload({"weights": weights, TOTAL: 240}))
    own = SummedReply.received(site_of(plain).handle(request), site.spec.secure.numbers)
    assert (stolen == own.words).all(), "this is what signatures are for"
    vars(site).pop("_masks")
    site.terms = SiteTerms(identity=IDENTITY)
    with pytest.raises(PayloadError, match=r"keys of 'text-0' are not signed by its site for this round"):
        read_by_a_server_that_plays_all_others(site, weights, run)


def replayed(folder: Path, rounds: Sequence[int]) -> list[str]:
    """Refusal of ``text-1`` when it gets keys and signature of ``text-2`` as they were in the first round."""
    session = prepared(federation(), folder)
    site_of(session).terms = SiteTerms(identity=IDENTITY)
    recorded: dict[str, dict[str, bytes]] = {}

    def changed(request: Request) -> Request:
        if (request.step, request.client) != (SHARES, "text-1"):
            return request
        both = {field: bytes_in(request.payload, field) for field in (KEYS, SIGNED)}
        if not recorded:
            recorded.update(both)
            return request
        old = {field: both[field] | {"text-2": recorded[field]["text-2"]} for field in both}
        return replace(request, payload=Payload({field: bytes_bundle(value) for field, value in old.items()}))

    engine = between(session, changes=changed)
    start = copy.deepcopy(session.server.weights)
    for place, number in enumerate(rounds):
        session.server.begin(number)
        session.server.weights.update(copy.deepcopy(start))
        session.experiment.algorithm.round(session.server, session.cohort(number, Ledger()))
        assert place or not errors_of(engine, "text-1"), "the first is as it should be"
    return errors_of(engine, "text-1")


def test_keys_and_signatures_of_an_earlier_round_are_found_out(tmp_path: Path) -> None:
    refused = replayed(tmp_path, [1, 2, 3])
    assert len(refused) == 2
    assert all(NOT_SIGNED in reason for reason in refused)


def test_keys_and_signatures_of_the_same_round_before_it_was_cut_short_open_nothing(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match="text-2: PayloadError: 'text-1': shares that were not made for this"):
        replayed(tmp_path, [1, 1])


def test_an_unknown_site_stops_the_sum_by_name(tmp_path: Path) -> None:
    stranger = SiteIdentity(OWN, {name: key for name, key in (IDENTITY.roster or {}).items() if name != "text-3"})
    with pytest.raises(ExchangeError, match=r"text-0: .*keys of 'text-3', whose site has no key on this site's roster"):
        one_round(tmp_path, stranger)


@pytest.mark.parametrize("other", [("run-2", 1, 0), ("run", 2, 0), ("run", 1, 1)], ids=["run", "round", "ask"])
def test_a_signature_is_for_one_run_round_and_ask(other: tuple[str, int, int]) -> None:
    public, context = b"p" * 96, context_of("run", 1, 0)
    signature = IDENTITY.signature("text-1", context, public)
    IDENTITY.require_signed({"text-1": public}, {"text-1": signature}, context)
    with pytest.raises(PayloadError, match="keys of 'text-1' are not signed by its site for this round"):
        IDENTITY.require_signed({"text-1": public}, {"text-1": signature}, context_of(*other))
