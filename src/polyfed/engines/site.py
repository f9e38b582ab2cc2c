"""A site: the place where clients live and where their steps execute, whatever engine carries the messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, DataError, PayloadError, RefusedError
from polyfed.core.randomness import isolated
from polyfed.data.samples import Samples
from polyfed.engines.outgoing import (
    LeavingFilter,
    Noised,
    Performing,
    ProtectedSteps,
    SiteTerms,
    detach_reply,
    failure_of,
    left_by,
)
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.client import Client, ClientInfo, Protection
from polyfed.federation.cohort import EVALUATING
from polyfed.federation.filters import Reply
from polyfed.federation.membership import Member
from polyfed.federation.participant import PublicSamples, TrainingSetup
from polyfed.federation.population import Population
from polyfed.federation.settings import SiteSettings
from polyfed.federation.state import ClientState, Lifetime, StateStore, flatten, unflatten
from polyfed.federation.trainer import Clock, Optimizers, first_not_finite
from polyfed.federation.types import Outline, outline_of, require_outline
from polyfed.models.model import Model, ModelSettings
from polyfed.privacy.answered import AnsweredAsk, AnsweredAsks
from polyfed.privacy.guard import PRIVATE, PrivacyGuard
from polyfed.privacy.masking.mask_keeper import MASKING, MaskKeeper, request_digest
from polyfed.privacy.private_training import PrivateTraining
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Request, StateVersion
from polyfed.wire.payload import Payload, PublicRows, Weights
from polyfed.wire.schema import StepSchema, steps_of

_log = logging.getLogger(__name__)


@dataclass
class _SiteServerEncoders:
    """The server's encoders at a client's site; one live module serves all clients there."""

    federation: Population
    member: Member
    settings: ModelSettings
    live: Callable[[], Model]
    blank: bool = False

    def model(self, weights: Mapping[str, Tensor]) -> Model:
        model = self.live()
        model.load(weights, partly=True)
        return model

    @property
    def train(self) -> Samples:
        train = self.federation.train(self.member, self.settings)
        return train.blank() if self.blank else train

    @property
    def test(self) -> Samples | None:
        return None if self.blank else self.federation.test(self.member, self.settings)


@dataclass
class _Data:
    train: Samples
    test: Samples | None
    public: PublicSamples


@dataclass
class Site:
    """Hosts clients of a federation: builds a client for a step, runs it, keeps what it declares to keep.

    One live model an architecture is resident, into which a client's weights are copied.

    Attributes:
        federation: data and models.
        spec: the run.
        store: kept states.
        device: where models run.
        evaluation_batch: samples a batch without gradients.
        limits: on what is received.
        terms: what the place allows.
        guard: protects replies and accounts for them, in runs with ``privacy``.
        step_losses: of the last client step, in order.
    """

    federation: Population
    spec: RunSpec
    store: StateStore
    device: torch.device
    evaluation_batch: int = 256
    limits: Limits = field(default_factory=Limits)
    terms: SiteTerms = field(default_factory=SiteTerms)
    guard: PrivacyGuard | None = None
    may_attack: ClassVar[bool] = False
    """Whether clients here attack if the run says so; no institution's do."""
    step_losses: list[Tensor] = field(default_factory=list)
    _idle: set[str] = field(default_factory=set)  # clients that were told to have made no step
    _models: dict[str, Model] = field(default_factory=dict)
    _data: dict[str, _Data] = field(default_factory=dict)
    _public: dict[str, PublicSamples] = field(default_factory=dict)
    _outlines: dict[str, Outline] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        settings: SiteSettings,
        spec: RunSpec,
        folder: Path,
        *,
        vocabulary: Path,
        federation: Population | None = None,
        limits: Limits | None = None,
        terms: SiteTerms | None = None,
    ) -> Site:
        """A site on this machine.

        Args:
            settings: the clients that live here, and their data.
            spec: the run.
            folder: where clients keep their states.
            vocabulary: folder of what is learnt from the public set.
            federation: data and models, if they are open already.
            limits: on what is received.
            terms: what the place allows.

        Raises:
            PolyfedError: data or device are not there, the public set is another one, or the run has attackers.
        """
        if spec.attackers and not cls.may_attack:
            raise ConfigError("run.attackers is for simulations; clients of this site do not attack: leave it out")
        sections = settings.data, settings.public, None, settings.clients
        opened = federation or Population(*sections, spec.seed, vocabulary, spec.algorithm.add_modules, spec.salt)
        _require_public(spec, opened.public_order)
        terms, guard = terms or SiteTerms(), None
        if spec.privacy is not None:
            settings_text = spec.model_dump_json(exclude={"run", "secure"}).encode()
            ledgers = terms.private or folder.parent.parent / PRIVATE
            guard = PrivacyGuard(spec.privacy, ledgers, settings.secret, terms.budget, terms.neighbours, settings_text)
        return cls(
            federation=opened,
            spec=spec,
            # on the site's disk: what Flower's own context keeps beyond some 100 MB is lost without a word
            store=StateStore(folder, settings.run.state_memory, late=spec.late_replies),
            device=resolve_device(settings.run.device),
            evaluation_batch=settings.run.evaluation_batch,
            limits=limits or Limits(),
            terms=terms,
            guard=guard,
        )

    @property
    def infos(self) -> tuple[ClientInfo, ...]:
        return self.federation.infos

    @cached_property
    def info(self) -> dict[str, ClientInfo]:
        return {info.id: info for info in self.infos}

    @property
    def keeps_states(self) -> bool:
        return bool(self.spec.algorithm.keeps) or self.spec.keep_models

    @cached_property
    def _steps(self) -> dict[str, StepSchema]:
        return steps_of(self.spec.algorithm)

    def answer(self, request: Request, *, tracebacks: bool = True) -> Answer:
        """``handle``, with what it raises as an answer; see ``failure_of`` for what is told without ``tracebacks``."""
        refused, self.step_losses = True, []
        try:
            self._require_planned(request)
            performed = self._accepted(request)
            refused = False
            return Answer(request.client, performed(), step_losses=self.step_losses)
        except Exception as error:
            _log.debug("client %s failed in step %s", request.client, request.step, exc_info=True)
            failure = failure_of(error, in_full=tracebacks, refused=refused)
            told = first_not_finite(self.step_losses) if tracebacks else ""
            return Answer(request.client, failure=replace(failure, text=failure.text + told))

    def _require_planned(self, request: Request) -> None:
        name, method = f"'{request.step}' of round {request.round}", self.spec.algorithm
        kind = "step" if request.step in MASKING or request.step not in self._steps else self._steps[request.step].kind
        first, last = (0, 0) if kind == "fresh" else (1, self.spec.rounds)
        if self.terms.private is not None and not first <= request.round <= last:
            when = "before its first round alone" if kind == "fresh" else f"in rounds 1 to {last}"
            raise RefusedError(f"{name}: the run asks for it {when}")
        asked = {step: schema.times for step, schema in self._steps.items() if schema.kind != "fresh"}
        starts = {"step": (0,), "query": (0, EVALUATING), "fresh": ()}[kind]
        if starts and not any(0 <= request.phase - start < sum(asked.values()) for start in starts):
            most = f"{sum(asked.values())} asks at most ({', '.join(asked)})"
            raise RefusedError(f"{name} as its ask {request.phase}: a round of '{method.component_name()}' has {most}")

    def handle(self, request: Request) -> Payload:
        """Run a step for a client and make durable what it keeps; a step that fails changes nothing.

        Raises:
            PolyfedError: no such client or step, the request or the reply is not as declared, or not finite.
            Exception: whatever the step raises.
        """
        return self._accepted(request)()

    def _accepted(self, request: Request) -> Callable[[], Payload]:
        """What performs a request that is not refused for what it asks."""
        member, masks, method = self.federation.members.get(request.client), self._masks, self.spec.algorithm
        if member is None:
            valid = ", ".join(self.federation.members)
            raise PayloadError(f"client '{request.client}' does not live here; there are: {valid}")
        if masks is not None and request.step in MASKING:
            reply = masks.answer(request, request.payload)
            return lambda: reply
        schema = self._steps.get(request.step)
        if schema is None:
            valid = ", ".join(self._steps)
            raise PayloadError(f"'{request.step}' is not a client step of '{method.component_name()}'; valid: {valid}")
        if schema.kind == "query" and not self.terms.measures:
            raise PayloadError(f"'{request.step}': no test metrics leave this site (demands.metrics: false)")
        received, members = self.spec.transport.decode(request.payload), list[str]()
        encode: Callable[[Payload], Payload] = self.spec.transport.encode
        if masks is not None and schema.mean_by:
            received, encode, members = masks.prepared(request, received, schema.mean_by)
        schema.require_request(received)
        received.require_sound(self.limits)
        perform = self.perform if self.guard is None else ProtectedSteps(self, self.guard, self.terms.stops).perform
        step = Performing(request, received, schema, member)

        def performed() -> Payload:
            self.data_of(member)  # a place that cannot open its data says so before anything is charged
            if self.terms.private is not None:
                self._require_expected(step)
            if members or self.terms.private is not None:
                asked = request_digest(request.step, request.payload)
                ask = AnsweredAsk(asked, members, step=request.step, start=self._start(step))
                self._account.record(request, ask)
            content = perform(step)
            for passing in self.filters if schema.kind == "step" else ():
                content = passing(content, step)
            return encode(content)

        return performed

    @cached_property
    def _account(self) -> AnsweredAsks:
        """What clients have answered: over all runs of an institution, or in the sums of this simulation."""
        private = self.terms.private
        folder = self.store.folder if private is None else private / "answered"
        return AnsweredAsks(folder, self.spec.terms, {step: schema.times for step, schema in self._steps.items()})

    def _start(self, step: Performing) -> str:
        """What decides a reply beside the plan and the request's fields: state gone on from, learning rate, noise."""
        request, schedule = step.request, step.member.settings.training.schedule
        keeps = self.spec.algorithm.keeps and step.schema.kind != "fresh"
        rate = schedule.factor(max(request.round, 1) - 1, self.spec.rounds)
        noise = [] if self.guard is None else [sha256(self.guard.terms).hexdigest()]  # is drawn from these too
        return json.dumps([request.after if keeps else None, rate, *noise])

    def _require_expected(self, step: Performing) -> None:
        """Raise RefusedError for tensors that no server of this run sends to the client."""
        for name, bundle in step.received.bundles.items():
            try:
                if isinstance(bundle, PublicRows):
                    bundle.require_public(self.federation.public_order)
                elif isinstance(bundle, Weights):
                    require_outline(bundle, self._expected(step.member, name, bundle))
            except PayloadError as error:
                raise RefusedError(f"request field '{name}': {error}") from error

    def _expected(self, member: Member, name: str, weights: Weights) -> Outline:
        """Names, shapes and types of weights in a field of a request, as far as the client's model tells."""
        key = self.info[member.id].architecture
        if key not in self._outlines:
            model = self._models.get(key) or self._model(member, None)
            self._outlines[key] = outline_of(model.exchanged())
        own, received = self._outlines[key], outline_of(weights)
        if name == "weights" and not self.spec.algorithm.sends_parts:
            return own
        known = {tensor: own[tensor] for tensor in received if tensor in own}
        if name == "weights":
            return known
        return received if self.spec.server_model is not None else {**received, **known}

    @cached_property
    def filters(self) -> tuple[LeavingFilter, ...]:
        """What the reply to a step passes, in that order, before it is masked or encoded."""
        return () if self.guard is None else (Noised(self.guard, {info.id: info.samples for info in self.infos}),)

    def perform(self, step: Performing, training: PrivateTraining | None = None, *, blank: bool = False) -> Payload:
        """What a step returns, in memory of its own; what the client keeps is stored.

        Args:
            step: that is asked for.
            training: trains in the client's place.
            blank: put blank samples in place of the client's, and store nothing.
        """
        request = step.request
        version = (request.round, request.phase)
        with isolated(self.spec.seed, request.round, request.client, request.step, request.phase):
            client = self.build_client(
                step.member, version, None if step.schema.kind == "fresh" else request.after, blank=blank
            )
            self.step_losses = client.optimizers.epochs.losses
            if self.guard is not None:
                client.protection = Protection(training)
            try:
                reply = getattr(self.spec.algorithm, step.schema.function.__name__)(client, **step.received.fields)
            finally:
                # gradients are private, and their memory is wanted for the next client
                if (model := self._models.get(client.info.architecture)) is not None:
                    model.zero_grad(set_to_none=True)
            if not isinstance(reply, Reply):
                returned = "None" if reply is None else f"a {type(reply).__name__}"
                raise TypeError(f"{step.schema.title} returned {returned}; return a Reply")
            if step.schema.kind == "step" and self.keeps_states and not blank:
                reply.payload.require_sound(self.limits)  # the server checks every reply; this guards what is kept
                self._keep(client, version, request.after, step.digest)
        if training is None and not blank:
            client.warn_if_idle(self._idle)
        return detach_reply(reply.payload, self._models.get(client.info.architecture))

    @cached_property
    def _masks(self) -> MaskKeeper | None:
        spec = self.spec
        if spec.secure is None:
            return None
        return MaskKeeper(spec.secure, spec.fingerprint, self._account, self.store.folder, self.terms.identity)

    def train_of(self, member: Member) -> Samples:
        """What a client trains on."""
        return self.federation.train(member)

    def build_client(
        self, member: Member, version: StateVersion, after: StateVersion | None = None, *, blank: bool = False
    ) -> Client:
        kept = self._kept(member.id, version, after)
        own = kept.pop("model", None)
        data = self.data_of(member)
        declared = {key: life for key, life in self.spec.algorithm.keeps.items() if key not in ("model", "optimizer")}
        server = self.spec.server_model
        return Client(
            name=member.id,
            load_model=lambda weights: self._model(member, own if weights is None else weights),
            setup=TrainingSetup(
                member.settings.task, member.head, member.settings.training, self.spec.precision, self.evaluation_batch
            ),
            clock=Clock(self.spec.seed, version[0], self.spec.rounds, self.spec.algorithm.epochs_a_round),
            public=data.public,
            optimizers=Optimizers(unflatten(kept.pop("optimizer", {}), ":")),
            info=self.info[member.id],
            train=data.train.blank() if blank else data.train,
            test=None if blank else data.test,
            state=ClientState(declared, kept),
            server_encoders=None
            if server is None
            else _SiteServerEncoders(self.federation, member, server, lambda: self._shared, blank),
        )

    @cached_property
    def _shared(self) -> Model:
        assert self.spec.server_model is not None
        return self.federation.shared_model(self.spec.server_model).to(self.device)

    def _kept(self, client_id: str, version: StateVersion, after: StateVersion | None) -> dict[str, dict[str, Tensor]]:
        if not self.spec.algorithm.keeps or after is None:
            return {}
        entry = self.store.load(client_id, after)
        current = {
            key for key, life in self.spec.algorithm.keeps.items() if life is Lifetime.RUN or after[0] == version[0]
        }
        return {key: value for key, value in unflatten(entry).items() if key in current}

    def _keep(self, client: Client, version: StateVersion, after: StateVersion | None, digest: bytes) -> None:
        keeps = self.spec.algorithm.keeps
        values = {key: dict(value) for key, value in client.state.items()}
        if "model" in keeps or self.spec.keep_models:  # what is not declared is never given back to a client
            values["model"] = client.model.exchanged()
        if "optimizer" in keeps:
            values["optimizer"] = flatten(client.optimizers.kept(), ":")
        self.store.save(client.name, version, flatten(values) | left_by(digest), after)

    def _model(self, member: Member, weights: Mapping[str, Tensor] | None) -> Model:
        key = self.info[member.id].architecture
        if weights is None or key not in self._models:
            # built again for a client without weights: it starts from its own initial ones
            self._models[key] = self.federation.client_model(member).to(self.device)
        model = self._models[key]
        if weights is not None:
            model.load(weights)
        return model

    def data_of(self, member: Member) -> _Data:
        if member.id not in self._data:
            key = f"{member.model.architecture} {list(member.views)}"
            if key not in self._public:
                pairs, parts = self.federation.public_samples(member.views), self.federation.public_parts(member.views)
                self._public[key] = PublicSamples(pairs, parts)
            train, test = self.train_of(member), self.federation.test(member)
            self._data[member.id] = _Data(train, test, self._public[key])
        return self._data[member.id]


def _require_public(spec: RunSpec, there: str) -> None:
    if spec.public_order and there != spec.public_order:
        raise DataError(
            f"the public set here is another one ({there or 'none'}, expected {spec.public_order}): "
            "compare source, split, items, per_item, unpaired and gallery of 'public', and the files of the source"
        )
