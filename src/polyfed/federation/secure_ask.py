"""The server's side of an ask whose replies are summed before it sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from polyfed.core.errors import ConfigError, ExchangeError, PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.filters import Ask, Received
from polyfed.federation.types import by_architecture
from polyfed.privacy.masking.fixed_point import Residues, total
from polyfed.privacy.masking.mask_keeper import (
    KEYS,
    OPENING,
    REQUEST,
    SEALED,
    SHARES,
    SIGNED,
    bytes_bundle,
    bytes_in,
    request_digest,
)
from polyfed.privacy.masking.summed import TOTAL, SummedReply
from polyfed.privacy.secure_sum import FEWEST, SecureSum
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Scalar, TensorBundle


@dataclass(frozen=True)
class SecureSums:
    """What is summed in a run, and how.

    Attributes:
        rule: that holds.
        run: fingerprint of the run's spec, which keys depend on.
        weights: client step -> scalar field of its reply that is its weight; None: each client counts alike.
    """

    rule: SecureSum
    run: str
    weights: Mapping[str, str | None]

    def replies(self, cohort: Cohort, ask: Ask, phase: int) -> Iterator[Received]:
        """The mean of each type, from each of its clients.

        Raises:
            ExchangeError: of a type too few words arrived, too few helped to unmask them, or the sum is none that the
                method may use.
        """
        ask.sent.update({client.id: ask.now(client) for client in ask.clients})
        cohort.listener.asking(ask.step, list(ask.sent))
        for reply in SecureAsk(self, cohort, ask, phase).replies():
            try:
                reply.payload.require_sound(cohort.channel.limits)
                ask.check(reply.payload, reply.client)
            except PayloadError as error:
                raise ExchangeError(f"round {cohort.round}: the sum of '{ask.step}': {error}") from error
            yield reply


def require_several(clients: Sequence[ClientInfo], when: str) -> None:
    """Check that nobody's value can be told from the sum of a type.

    Raises:
        ConfigError: a type has too few clients.
    """
    for kind in by_architecture(clients).values():
        if len(kind) < FEWEST:
            raise ConfigError(
                f"{when}: aggregation.secure needs {FEWEST} clients of a type, and type '{kind[0].group}' has "
                f"{len(kind)} ({', '.join(client.id for client in kind)}); ask more clients, or leave it out"
            )


@dataclass
class _Type:
    """Clients of one type on their way to a sum.

    Attributes:
        asked: at the beginning.
        request: digest of what all of them are asked.
        public: client -> its public half, of those who sent some.
        signed: client -> its site's signature of that, of those whose sites sign.
        sealed: receiver -> sender -> shares.
        sums: layout and length of replies -> their sum, and who sent them.
        sent: whose words count.
        words, layout: sum of what they sent.
        missing: client -> why.
    """

    asked: Sequence[ClientInfo]
    request: str = ""
    public: dict[str, bytes] = field(default_factory=dict)
    signed: dict[str, bytes] = field(default_factory=dict)
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    sums: dict[tuple[str, int], tuple[Residues, list[ClientInfo]]] = field(default_factory=dict)
    sent: list[ClientInfo] = field(default_factory=list)
    words: Residues | None = None
    layout: str = ""
    missing: dict[str, str] = field(default_factory=dict)


def told_keys(kind: _Type) -> dict[str, TensorBundle]:
    told = {KEYS: bytes_bundle(kind.public)}
    return told | ({SIGNED: bytes_bundle(kind.signed)} if kind.signed else {})


@dataclass
class SecureAsk:
    """One ask.

    Attributes:
        sums: what holds.
        cohort: who asks; clients that fail are put out of it.
        ask, phase: what is asked, and its number in the round.
    """

    sums: SecureSums
    cohort: Cohort
    ask: Ask
    phase: int
    _types: dict[str, _Type] = field(default_factory=dict, init=False)

    def _requests(self) -> list[Request]:
        """The step's requests to those who have exchanged keys and shares with the others of their type."""
        self._types = {name: _Type(kind) for name, kind in by_architecture(self.cohort.clients).items()}
        contents = {
            client.id: Payload({**self.ask.sent[client.id].fields, TOTAL: self._total(self._of(client))})
            for client in self.cohort.clients
        }
        if self.sums.rule.masks:
            self._settle_requests(contents)
            self._exchange_keys()
            self._exchange_shares()
            contents = {client.id: self._with_shares(client, contents[client.id]) for client in self.cohort.clients}
        self._require_enough(lambda kind: [client for client in self.cohort.clients if client in kind.asked])
        return list(self.cohort.requests(self.ask.step, self.phase, contents).values())

    def _settle_requests(self, contents: Mapping[str, Payload]) -> None:
        """Lay down what each type is asked, before its clients make keys that are good for nothing else."""
        encode = self.cohort.channel.transport.encoder()
        for kind in self._types.values():
            digests = {client.id: request_digest(self.ask.step, encode(contents[client.id])) for client in kind.asked}
            kind.request = digests[kind.asked[0].id]
            if other := next((name for name, digest in digests.items() if digest != kind.request), None):
                raise ExchangeError(
                    f"{self._where(kind)}: '{other}' would be asked something else than '{kind.asked[0].id}', and a "
                    "masked sum is of clients of a type that are all asked the same"
                )

    def _with_shares(self, client: ClientInfo, plain: Payload) -> Payload:
        return Payload({**plain.fields, SEALED: bytes_bundle(self._of(client).sealed[client.id])})

    def replies(self) -> Iterator[Received]:
        """As ``SecureSums.replies``; of the sum nothing has been checked."""
        requests = self._requests()
        asked = {client.id: client for client in self.cohort.clients}
        for answer in self._exchange(requests):
            client = asked[answer.client]
            try:
                self._fold(client, self._decoded(self.ask.step, client, answer))
            except PayloadError as error:
                self._lost(client, str(error), answer.details)
        for kind in self._types.values():
            self._settle_layout(kind)
        self._require_enough(lambda kind: kind.sent)
        shares = self._shares_of_survivors() if self.sums.rule.masks else {}
        for kind in self._types.values():
            yield from self._unfolded(kind, shares)

    # ---- phases

    def _exchange_keys(self) -> None:
        asked = {client.id: Payload({REQUEST: self._of(client).request}) for client in self.cohort.clients}
        for client, payload in self._carried(KEYS, asked):
            public = bytes_in(payload, KEYS)
            signed = bytes_in(payload, SIGNED) if SIGNED in payload.fields else {}
            if set(public) != {client.id} or set(signed) - {client.id}:
                self._lost(client, f"keys of {sorted({*public, *signed})} in place of its own")
            else:
                self._of(client).public |= public
                self._of(client).signed |= signed
        self._require_enough(lambda kind: [client for client in kind.asked if client.id in kind.public])

    def _exchange_shares(self) -> None:
        keys = {name: Payload(told_keys(kind)) for name, kind in self._types.items()}
        made: dict[str, dict[str, bytes]] = {}
        wanted = {client.id: keys[client.architecture] for client in self.cohort.clients}
        for client, payload in self._carried(SHARES, wanted):
            own = bytes_in(payload, SEALED)
            if set(own) != set(self._of(client).public) - {client.id}:
                self._lost(client, "it made shares for others than it was asked to")
            else:
                made[client.id] = own
        for client in self.cohort.clients:
            senders = [name for name in self._of(client).public if name in made and name != client.id]
            self._of(client).sealed[client.id] = {name: made[name][client.id] for name in senders}

    def _fold(self, client: ClientInfo, payload: Payload) -> None:
        kind, reply = self._of(client), SummedReply.received(payload, self.sums.rule.numbers)
        layout = reply.layout, len(reply.words)
        words, senders = kind.sums.get(layout, (None, []))
        kind.sums[layout] = reply.words.copy() if words is None else total([words, reply.words]), [*senders, client]

    def _settle_layout(self, kind: _Type) -> None:
        """Go on with the sum that most replies are laid out for: a false one must not put out the others."""
        if not kind.sums:
            return
        (kind.layout, _), (kind.words, kind.sent) = max(kind.sums.items(), key=lambda own: len(own[1][1]))
        for client in [client for _, senders in kind.sums.values() for client in senders]:
            if client in kind.sent:
                self.ask.accept(client)
            else:
                self._lost(client, "the reply is laid out unlike those of others of its type")
        kind.sums.clear()

    def _shares_of_survivors(self) -> dict[str, dict[str, bytes]]:
        survivors = {
            client.id: Payload({OPENING: bytes_bundle({other.id: b"1" for other in kind.sent})})
            for kind in self._types.values()
            for client in kind.sent
        }
        shares: dict[str, dict[str, bytes]] = {}
        # who replied and then is gone has done its part: it stays in the round
        for answer in self._exchanged(OPENING, survivors):
            client = next(one for one in self.cohort.clients if one.id == answer.client)
            try:
                shares[client.id] = bytes_in(self._decoded(OPENING, client, answer), OPENING)
            except PayloadError as error:
                self._of(client).missing[client.id] = str(error)
        return shares

    def _unfolded(self, kind: _Type, shares: Mapping[str, Mapping[str, bytes]]) -> Iterator[Received]:
        by, rule = self.sums.weights[self.ask.step], self.sums.rule
        assert kind.words is not None
        try:
            words = self._unmasked(kind, kind.words, shares) if rule.masks else kind.words
            payload, weight = SummedReply(words, kind.layout).mean(by, len(kind.sent), self._total(kind), rule.numbers)
        except PayloadError as error:
            raise ExchangeError(f"{self._where(kind)}: {error}{self._who_is_missing(kind)}") from error
        for k, client in enumerate(kind.sent):
            # equal means add up to themselves, whatever part of the weight each gets
            part = weight // len(kind.sent) + (k < weight % len(kind.sent))
            own: dict[str, TensorBundle | Scalar] = {} if by is None else {by: part}
            yield Received(client, Payload({**payload.fields, **own}))

    def _unmasked(self, kind: _Type, words: Residues, shares: Mapping[str, Mapping[str, bytes]]) -> Residues:
        from polyfed.privacy.masking.party import context_of
        from polyfed.privacy.masking.unmasking import Unmasking

        survivors = [client.id for client in kind.sent]
        masked = sorted({*next(iter(kind.sealed[name] for name in survivors)), survivors[0]})
        context = context_of(self.sums.run, self.cohort.round, self.phase, kind.request)
        unmasking = Unmasking(context, kind.public, masked, self.sums.rule.required(len(kind.public)))
        return unmasking.sum(words, survivors, {name: shares[name] for name in survivors if name in shares})

    # ---- exchanges

    def _carried(self, step: str, payloads: Mapping[str, Payload]) -> Iterator[tuple[ClientInfo, Payload]]:
        by_id = {client.id: client for client in self.cohort.clients}
        for answer in self._exchanged(step, payloads):
            client = by_id[answer.client]
            try:
                payload = self._decoded(step, client, answer)
                bytes_in(payload, SEALED if step == SHARES else step)
            except PayloadError as error:
                self._lost(client, str(error), answer.details)
                continue
            yield client, payload

    def _exchanged(self, step: str, payloads: Mapping[str, Payload]) -> Iterator[Answer]:
        cohort = self.cohort
        asked = [client.id for client in cohort.clients if client.id in payloads]
        requests = [Request(name, step, cohort.round, self.phase, None, payloads[name]) for name in asked]
        return self._exchange([cohort.channel.sends(request, request.payload) for request in requests])

    def _exchange(self, requests: list[Request]) -> Iterator[Answer]:
        return self.cohort.channel.exchange(requests, self.cohort.reply_policy(self.ask.step).deadline)

    def _decoded(self, step: str, client: ClientInfo, answer: Answer) -> Payload:
        if answer.payload is None:
            raise PayloadError(answer.error or "no answer")
        request = Request(client.id, step, self.cohort.round, self.phase, None, Payload({}))
        return self.cohort.channel.decoded(request, answer.payload)

    # ---- who is there

    def _of(self, client: ClientInfo) -> _Type:
        return self._types[client.architecture]

    def _total(self, kind: _Type) -> int:
        if self.sums.weights[self.ask.step] is None:  # each counts alike
            return len(kind.asked)
        return max(1, sum(client.samples for client in kind.asked))

    def _lost(self, client: ClientInfo, reason: str, details: str = "") -> None:
        self._of(client).missing[client.id] = reason
        self.ask.drop(client, reason, details)

    def _require_enough(self, left: Callable[[_Type], Sequence[ClientInfo]]) -> None:
        for kind in self._types.values():
            needed = max(self.sums.rule.required(len(kind.public) or len(kind.asked)), FEWEST)
            if len(left(kind)) < needed:
                raise ExchangeError(
                    f"{self._where(kind)}: {len(left(kind))} of {len(kind.asked)} clients are left, and "
                    f"aggregation.secure needs {needed}{self._who_is_missing(kind)}"
                )

    def _where(self, kind: _Type) -> str:
        groups = "+".join(sorted({client.group for client in kind.asked}))
        return f"round {self.cohort.round}: '{self.ask.step}', type '{groups}'"

    def _who_is_missing(self, kind: _Type) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in kind.missing.items())
        return f" (missing: {reasons})" if reasons else ""
