"""The server's side of an ask whose replies are summed before it sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from polyfed.core.errors import ConfigError, ExchangeError, PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.filters import Ask, Reply
from polyfed.federation.types import by_architecture
from polyfed.privacy.masking import mask_keeper
from polyfed.privacy.masking.mask_keeper import KEYS, OPENING, REQUEST, SEALED, SHARES, SIGNED, bytes_bundle, bytes_in
from polyfed.privacy.secure_sum import FEWEST, TOTAL, Residues, SecureSum, SummedReply, total
from polyfed.wire.limits import ReplySize
from polyfed.wire.messages import NO_ANSWER, Cause, Failure, Request
from polyfed.wire.payload import Payload

_Read = TypeVar("_Read")
_MEMBER_BYTES = 1024  # of keys, signatures and shares, for each client


@dataclass(frozen=True)
class SecureSums:
    """Sums of replies whose single values the server never sees.

    Attributes:
        rule: settings of the masked sum in force.
        run: fingerprint of the run's spec, which keys depend on.
    """

    rule: SecureSum
    run: str

    def __call__(self, cohort: Cohort, ask: Ask, phase: int) -> Iterator[Reply]:
        """Mean of each type, as the reply of each of its clients.

        Raises:
            ExchangeError: of a type too few words arrived, too few helped to unmask them, or the sum is not
                what was asked for.
        """
        ask.sent.update({client.id: ask.now(client) for client in ask.clients})
        cohort.listener.asking(ask.step, list(ask.sent))
        for reply in SecureAsk(self, cohort, ask, phase).replies():
            try:
                reply.payload.require_sound(cohort.channel.limits)
                ask.require(reply)
            except PayloadError as error:
                raise ExchangeError(f"round {cohort.round}: the sum of '{ask.step}': {error}") from error
            yield reply


def require_several(clients: Sequence[ClientInfo], when: str) -> None:
    """Check that no client's value can be inferred from the sum of a type.

    Raises:
        ConfigError: a type has too few clients.
    """
    for members in by_architecture(clients).values():
        if len(members) < FEWEST:
            raise ConfigError(
                f"{when}: aggregation.secure needs {FEWEST} clients of a type, and type '{members[0].group}' has "
                f"{len(members)} ({', '.join(client.id for client in members)}); ask more clients, or leave it out"
            )


@dataclass
class _TypeSum:
    """Clients of one type on their way to a sum.

    Attributes:
        asked: clients at the beginning.
        request: digest of what all of them are asked.
        public: client -> its public half, of those who sent some.
        signed: client -> its site's signature of that, of those whose sites sign.
        sealed: receiver -> sender -> shares.
        sums: layout and length of replies -> their sum, and who sent them.
        sent: clients whose words are in the sum.
        words, layout: sum of their words, and its layout.
        missing: client -> failure.
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
    missing: dict[str, Failure] = field(default_factory=dict)

    @property
    def keys(self) -> Payload:
        """Public keys of its clients, as each of them receives them."""
        keys = {KEYS: bytes_bundle(self.public)}
        return Payload(keys | ({SIGNED: bytes_bundle(self.signed)} if self.signed else {}))

    def fold(self, client: ClientInfo, reply: SummedReply) -> None:
        layout = reply.layout, len(reply.words)
        words, senders = self.sums.get(layout, (None, []))
        self.sums[layout] = reply.words.copy() if words is None else total([words, reply.words]), [*senders, client]


@dataclass
class SecureAsk:
    """One ask whose replies are summed.

    Attributes:
        sums: settings of the sum.
        cohort: cohort that asks; clients that fail leave it.
        ask, phase: request, and its number in the round.
    """

    sums: SecureSums
    cohort: Cohort
    ask: Ask
    phase: int
    _types: dict[str, _TypeSum] = field(default_factory=dict, init=False)

    def replies(self) -> Iterator[Reply]:
        """Unchecked means, see ``SecureSums``."""
        self._types = {name: _TypeSum(clients) for name, clients in by_architecture(self.cohort.clients).items()}
        for client, reply in self._received(self.ask.step, self._requests(), self._read_reply):
            self._of(client).fold(client, reply)
        for type_sum in self._types.values():
            self._settle_layout(type_sum)
        self._require_enough(lambda type_sum: type_sum.sent)
        shares = self._shares_of_survivors() if self.sums.rule.masks else {}
        for type_sum in self._types.values():
            yield from self._unfolded(type_sum, shares)

    # ---- phases

    def _requests(self) -> list[Request]:
        """The step's requests to those who have exchanged keys and shares with the others of their type."""
        totals = {client.id: self._total(self._of(client)) for client in self.cohort.clients}
        contents = {name: Payload({**self.ask.sent[name].fields, TOTAL: own}) for name, own in totals.items()}
        if self.sums.rule.masks:
            self._settle_requests(contents)
            self._exchange_keys()
            self._exchange_shares()
            sealed = {client.id: bytes_bundle(self._of(client).sealed[client.id]) for client in self.cohort.clients}
            contents = {name: Payload({**contents[name].fields, SEALED: own}) for name, own in sealed.items()}
        self._require_enough(lambda own: [client for client in self.cohort.clients if client in own.asked])
        return list(self.cohort.requests(self.ask, self.phase, contents, self.sums.rule.bits // 8).values())

    def _settle_requests(self, contents: Mapping[str, Payload]) -> None:
        """Lay down what each type is asked, before its clients make keys that are good for nothing else."""
        encode = self.cohort.channel.transport.encoder()
        for type_sum in self._types.values():
            names = [client.id for client in type_sum.asked]
            digests = {name: mask_keeper.request_digest(self.ask.step, encode(contents[name])) for name in names}
            type_sum.request = digests[type_sum.asked[0].id]
            if other := next((name for name, digest in digests.items() if digest != type_sum.request), None):
                what = f"{self._where(type_sum)}: '{other}' would be asked something else than '{type_sum.asked[0].id}'"
                raise ExchangeError(f"{what}, and a masked sum is of clients of a type that are all asked the same")

    def _exchange_keys(self) -> None:
        asked = {client.id: Payload({REQUEST: self._of(client).request}) for client in self.cohort.clients}
        for client, payload in self._carried(KEYS, asked):
            public = bytes_in(payload, KEYS)
            signed = bytes_in(payload, SIGNED) if SIGNED in payload.fields else {}
            if set(public) != {client.id} or set(signed) - {client.id}:
                self._lost(client, _invalid(f"keys of {sorted({*public, *signed})} in place of its own"))
            else:
                self._of(client).public |= public
                self._of(client).signed |= signed
        self._require_enough(lambda type_sum: [client for client in type_sum.asked if client.id in type_sum.public])

    def _exchange_shares(self) -> None:
        keys = {name: type_sum.keys for name, type_sum in self._types.items()}
        made: dict[str, dict[str, bytes]] = {}
        wanted = {client.id: keys[client.architecture] for client in self.cohort.clients}
        for client, payload in self._carried(SHARES, wanted):
            own = bytes_in(payload, SEALED)
            if set(own) != set(self._of(client).public) - {client.id}:
                self._lost(client, _invalid("it made shares for others than it was asked to"))
            else:
                made[client.id] = own
        for client in self.cohort.clients:
            senders = [name for name in self._of(client).public if name in made and name != client.id]
            self._of(client).sealed[client.id] = {name: made[name][client.id] for name in senders}

    def _settle_layout(self, type_sum: _TypeSum) -> None:
        """Go on with the sum that most replies are laid out for: a false one must not put out the others."""
        if not type_sum.sums:
            return
        (layout, _), (words, sent) = max(type_sum.sums.items(), key=lambda item: len(item[1][1]))
        type_sum.layout, type_sum.words, type_sum.sent = layout, words, sent
        for client in [client for _, senders in type_sum.sums.values() for client in senders]:
            if client in sent:
                self.ask.accept(client)
            else:
                self._lost(client, _invalid("the reply is laid out unlike those of others of its type"))
        type_sum.sums.clear()

    def _shares_of_survivors(self) -> dict[str, dict[str, bytes]]:
        survivors = {
            client.id: Payload({OPENING: bytes_bundle({other.id: b"1" for other in type_sum.sent})})
            for type_sum in self._types.values()
            for client in type_sum.sent
        }

        def note(client: ClientInfo, failure: Failure) -> None:
            # who replied and then is gone has done its part: it stays in the round
            self._of(client).missing[client.id] = failure

        opened = self._carried(OPENING, survivors, note)
        return {client.id: bytes_in(payload, OPENING) for client, payload in opened}

    def _unfolded(self, type_sum: _TypeSum, shares: Mapping[str, Mapping[str, bytes]]) -> Iterator[Reply]:
        by, rule, sent = self.ask.schema.mean_by, self.sums.rule, type_sum.sent
        assert type_sum.words is not None
        assert by is not None
        try:
            words = self._unmasked(type_sum, type_sum.words, shares) if rule.masks else type_sum.words
            summed = SummedReply(words, type_sum.layout)
            payload, weight = summed.mean(by, len(sent), self._total(type_sum), rule.numbers)
        except PayloadError as error:
            raise ExchangeError(f"{self._where(type_sum)}: {error}{self._who_is_missing(type_sum)}") from error
        for k, client in enumerate(sent):
            # equal means add up to themselves, whatever part of the weight each gets
            part = weight // len(sent) + (k < weight % len(sent))
            yield Reply.received(Payload({**payload.fields, by: part}), client)

    def _unmasked(self, type_sum: _TypeSum, words: Residues, shares: Mapping[str, Mapping[str, bytes]]) -> Residues:
        from polyfed.privacy.masking.party import Unmasking, context_of

        survivors = [client.id for client in type_sum.sent]
        masked = sorted({*next(iter(type_sum.sealed[name] for name in survivors)), survivors[0]})
        context = context_of(self.sums.run, self.cohort.round, self.phase, type_sum.request)
        unmasking = Unmasking(context, type_sum.public, masked, self.sums.rule.required(len(type_sum.public)))
        return unmasking.sum(words, survivors, {name: shares[name] for name in survivors if name in shares})

    # ---- exchanges

    def _carried(
        self, step: str, payloads: Mapping[str, Payload], lost: Callable[[ClientInfo, Failure], None] | None = None
    ) -> Iterator[tuple[ClientInfo, Payload]]:
        """Answers of clients to a step of the masking."""

        def read(payload: Payload) -> Payload:
            bytes_in(payload, SEALED if step == SHARES else step)
            return payload

        cohort = self.cohort
        asked = [client.id for client in cohort.clients if client.id in payloads]
        members = len(cohort.clients) + 2
        most = ReplySize(members, members * _MEMBER_BYTES)
        requests = [Request(name, step, cohort.round, self.phase, None, payloads[name], most) for name in asked]
        sent = [cohort.channel.sends(request, request.payload) for request in requests]
        return self._received(step, sent, read, lost)

    def _received(
        self,
        step: str,
        requests: list[Request],
        read: Callable[[Payload], _Read],
        lost: Callable[[ClientInfo, Failure], None] | None = None,
    ) -> Iterator[tuple[ClientInfo, _Read]]:
        """Clients and their answers, as read; clients whose answers cannot be read are ``lost``."""
        clients, lost = {client.id: client for client in self.cohort.clients}, lost or self._lost
        for answer in self.cohort.channel.exchange(requests, self.cohort.reply_policy(self.ask.step).deadline):
            client = clients[answer.client]
            request = Request(client.id, step, self.cohort.round, self.phase, None, Payload({}))
            if answer.payload is None:
                self.cohort.channel.refused(request, answer.refused_bytes)
                lost(client, answer.failure or NO_ANSWER)
                continue
            try:
                content = read(self.cohort.channel.decoded(request, answer.payload))
            except PayloadError as error:
                lost(client, Failure(Cause.INVALID, str(error), error=error))
            else:
                yield client, content

    def _read_reply(self, payload: Payload) -> SummedReply:
        return SummedReply.received(payload, self.sums.rule.numbers)

    # ---- who is there

    def _of(self, client: ClientInfo) -> _TypeSum:
        return self._types[client.architecture]

    def _total(self, type_sum: _TypeSum) -> int:
        return max(1, sum(client.samples for client in type_sum.asked))

    def _lost(self, client: ClientInfo, failure: Failure) -> None:
        self._of(client).missing[client.id] = failure
        self.ask.drop(client, failure)

    def _require_enough(self, left: Callable[[_TypeSum], Sequence[ClientInfo]]) -> None:
        for type_sum in self._types.values():
            needed = max(self.sums.rule.required(len(type_sum.public) or len(type_sum.asked)), FEWEST)
            if len(left(type_sum)) < needed:
                what = f"{self._where(type_sum)}: {len(left(type_sum))} of {len(type_sum.asked)} clients are left"
                raise ExchangeError(f"{what}, and aggregation.secure needs {needed}{self._who_is_missing(type_sum)}")

    def _where(self, type_sum: _TypeSum) -> str:
        groups = "+".join(sorted({client.group for client in type_sum.asked}))
        return f"round {self.cohort.round}: '{self.ask.step}', type '{groups}'"

    def _who_is_missing(self, type_sum: _TypeSum) -> str:
        reasons = "; ".join(f"{name}: {failure.text}" for name, failure in type_sum.missing.items())
        return f" (missing: {reasons})" if reasons else ""


def _invalid(text: str) -> Failure:
    return Failure(Cause.INVALID, text)
