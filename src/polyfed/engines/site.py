"""Sites: the clients that live there and the execution of their steps, whatever engine carries the messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.core.device import keep_freed_memory, resolve_device
from polyfed.core.errors import ConfigError, DataError, PayloadError, RefusedError
from polyfed.core.randomness import isolated
from polyfed.data.device_memory import memory_of
from polyfed.data.samples import Samples
from polyfed.engines.outgoing import Encoded, Noised, Performing, SiteTerms, detach_reply, failure_of
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.client import Client, ClientInfo, Protection
from polyfed.federation.cohort import EVALUATING
from polyfed.federation.filters import Filter, Reply, passed
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
from polyfed.privacy.release import require_updates
from polyfed.privacy.settings import EXAMPLES, UPDATE
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Request, StateVersion
from polyfed.wire.payload import Payload, PublicRows, Scalar, TensorBundle, Weights
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
    """Hosts clients of a federation: builds a client for a step, runs it, and stores the state it declares.

    One live model per architecture is resident; a client's weights are copied into it.

    Attributes:
        federation: Data and models.
        spec: Spec of the run.
        store: Stored states of the clients.
        device: Device of the models.
        evaluation_batch: Samples per batch without gradients.
        limits: Limits on received messages.
        terms: Terms of the site over all its runs.
        guard: Protection of replies and its account, in runs with ``privacy``.
        step_losses: Losses of the last client step, in order.
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
    """True if clients here attack when the run requests it, as in simulations."""
    step_losses: list[Tensor] = field(default_factory=list)
    _idle: set[str] = field(default_factory=set)  # clients that were warned of having made no step
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
            settings: Clients that live here, and their data.
            spec: Spec of the run.
            folder: Folder of the clients' states.
            vocabulary: Folder of vocabularies learnt from the public set.
            federation: Data and models, if they are open already.
            limits: Limits on received messages.
            terms: Terms of the site over all its runs.

        Raises:
            PolyfedError: data or device are missing, the public set differs, or the run has attackers.
        """
        if spec.attackers and not cls.may_attack:
            raise ConfigError("run.attackers is for simulations; clients of this site do not attack: leave it out")
        sections = settings.data, settings.public, None, settings.clients
        device = resolve_device(settings.run.device)
        keep_freed_memory()
        opened = federation or Population(*sections, spec.seed, vocabulary, spec.algorithm.add_modules, spec.salt)
        opened.data.memory = opened.data.memory or memory_of(device, settings.data.device_memory)
        if spec.public_order and opened.public_order != spec.public_order:
            raise DataError(
                f"the public set here differs ({opened.public_order or 'none'}, expected {spec.public_order}): "
                "compare source, split, items, per_item, unpaired and gallery of 'public', and the files of the source"
            )
        terms, guard = terms or SiteTerms(), None
        if spec.privacy is not None:
            settings_text = spec.model_dump_json(exclude={"run", "secure"}).encode()
            ledgers = terms.private or folder.parent.parent / PRIVATE
            guard = PrivacyGuard(spec.privacy, ledgers, settings.secret, terms.budget, terms.neighbours, settings_text)
        # on the site's disk: Flower's own context silently loses anything beyond some 100 MB
        store = StateStore(folder, settings.run.state_memory, late=spec.late_replies)
        return cls(opened, spec, store, device, settings.run.evaluation_batch, limits or Limits(), terms, guard)

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

    # ---- requests

    def answer(self, request: Request, *, tracebacks: bool = True) -> Answer:
        """``handle`` with errors as answers; ``failure_of`` describes their content without ``tracebacks``."""
        refused, self.step_losses = True, []
        try:
            self._require_planned(request)
            perform = self._accepted(request)
            refused = False
            return Answer(request.client, perform(), step_losses=self.step_losses)
        except Exception as error:
            _log.debug("client %s failed in step %s", request.client, request.step, exc_info=True)
            failure = failure_of(error, in_full=tracebacks, refused=refused)
            loss = first_not_finite(self.step_losses) if tracebacks else ""
            return Answer(request.client, failure=replace(failure, text=failure.text + loss))

    def _require_planned(self, request: Request) -> None:
        name, method = f"'{request.step}' of round {request.round}", self.spec.algorithm
        type_of_step = "step" if request.step not in self._steps else self._steps[request.step].kind
        first, last = (0, 0) if type_of_step == "fresh" else (1, self.spec.rounds)
        if self.terms.private is not None and not first <= request.round <= last:
            when = "before its first round only" if type_of_step == "fresh" else f"in rounds 1 to {last}"
            raise RefusedError(f"{name}: the run asks for it {when}")
        asked = {step: schema.times for step, schema in self._steps.items() if schema.kind != "fresh"}
        starts = {"step": (0,), "query": (0, EVALUATING), "fresh": ()}[type_of_step]
        if starts and not any(0 <= request.phase - start < sum(asked.values()) for start in starts):
            most = f"{sum(asked.values())} asks at most ({', '.join(asked)})"
            raise RefusedError(f"{name} as its ask {request.phase}: a round of '{method.component_name()}' has {most}")

    def handle(self, request: Request) -> Payload:
        """Run a step for a client and make its state durable; a step that fails changes nothing.

        Raises:
            PolyfedError: the client or step is unknown, or the request or the reply is not as declared or not finite.
            Exception: any exception of the step.
        """
        return self._accepted(request)()

    def _accepted(self, request: Request) -> Callable[[], Payload]:
        """The execution of a request, once the request itself has passed all checks."""
        member, masks, method = self.federation.members.get(request.client), self._masks, self.spec.algorithm
        if member is None:
            valid = ", ".join(self.federation.members)
            raise PayloadError(f"client '{request.client}' does not live here; there are: {valid}")
        if masks is not None and request.step in MASKING:
            reply = masks.answer(request)
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
        step = Performing(request, received, schema, member)
        filters = (*(self.filters if schema.kind == "step" else ()), Encoded(encode))

        def perform() -> Payload:
            self.data_of(member)  # a site that cannot open its data fails before anything is charged
            if self.terms.private is not None:
                self._require_expected(step)
            if members or self.terms.private is not None:
                asked = request_digest(request.step, request.payload)
                ask = AnsweredAsk(asked, members, step=request.step, start=self._start(step))
                self._account.record(request, ask)
            reply = Reply()
            reply.payload = self.perform(step) if self.guard is None else ProtectedSteps(self, self.guard).perform(step)
            (reply,) = passed(iter([reply]), filters, step)
            return reply.payload

        return perform

    @cached_property
    def _account(self) -> AnsweredAsks:
        """Account of answered asks: over all runs of an institution, or for the sums of this simulation."""
        private = self.terms.private
        folder = self.store.folder if private is None else private / "answered"
        return AnsweredAsks(folder, self.spec.terms, {step: schema.times for step, schema in self._steps.items()})

    def _start(self, step: Performing) -> str:
        """Inputs of a reply in addition to plan and request fields: previous state, learning rate, noise."""
        request, schedule = step.request, step.member.settings.training.schedule
        keeps = self.spec.algorithm.keeps and step.schema.kind != "fresh"
        rate = schedule.factor(max(request.round, 1) - 1, self.spec.rounds)
        noise = [] if self.guard is None else [sha256(self.guard.terms).hexdigest()]  # noise is drawn from these too
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
        """Names, shapes and types of weights in a field of a request, as far as the client's model defines them."""
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
    def _masks(self) -> MaskKeeper | None:
        spec = self.spec
        if spec.secure is None:
            return None
        return MaskKeeper(spec.secure, spec.fingerprint, self._account, self.store.folder, self.terms.identity)

    # ---- steps

    @cached_property
    def filters(self) -> Sequence[Filter[Performing]]:
        """Filters of the reply to a step, in order, before it is masked or encoded."""
        return () if self.guard is None else (Noised(self.guard, {info.id: info.samples for info in self.infos}),)

    def perform(self, step: Performing, training: PrivateTraining | None = None, *, blank: bool = False) -> Payload:
        """Content of a step's reply, in memory of its own; the client's state is stored.

        Args:
            step: The step.
            training: Training in place of the client's own.
            blank: True to replace the client's samples by blank ones, and to store nothing.
        """
        request = step.request
        version = (request.round, request.phase)
        with isolated(self.spec.seed, request.round, request.client, request.step, request.phase):
            after = None if step.schema.kind == "fresh" else request.after
            client = self.build_client(step.member, version, after, blank=blank)
            self.step_losses = client.optimizers.epochs.losses
            if self.guard is not None:
                client.protection = Protection(training)
            try:
                reply = getattr(self.spec.algorithm, step.schema.function.__name__)(client, **step.received.fields)
            finally:
                # gradients are private, and the next client needs their memory
                if (model := self._models.get(client.info.architecture)) is not None:
                    model.zero_grad(set_to_none=True)
            if not isinstance(reply, Reply):
                returned = "None" if reply is None else f"a {type(reply).__name__}"
                raise TypeError(f"{step.schema.title} returned {returned}; return a Reply")
            payload = detach_reply(reply.payload, self._models.get(client.info.architecture))
            if step.schema.kind == "step" and self.keeps_states and not blank:
                payload.require_sound(self.limits)  # the server checks every reply; this guards the state
                self._keep(client, version, request.after, step.digest)
        if training is None and not blank:
            client.warn_if_idle(self._idle)
        return payload

    def train_of(self, member: Member) -> Samples:
        """Training samples of a client."""
        return self.federation.train(member)

    def build_client(
        self, member: Member, version: StateVersion, after: StateVersion | None = None, *, blank: bool = False
    ) -> Client:
        kept, algorithm, server = self._kept(member.id, version, after), self.spec.algorithm, self.spec.server_model
        own, data = kept.pop("model", None), self.data_of(member)
        declared = {key: life for key, life in algorithm.keeps.items() if key not in ("model", "optimizer")}
        encoders = None
        if server is not None:
            encoders = _SiteServerEncoders(self.federation, member, server, lambda: self._shared, blank)
        return Client(
            name=member.id,
            load_model=lambda weights: self._model(member, own if weights is None else weights),
            setup=TrainingSetup(
                member.settings.task, member.head, member.settings.training, self.spec.precision, self.evaluation_batch
            ),
            clock=Clock(self.spec.seed, version[0], self.spec.rounds, algorithm.epochs_a_round),
            public=data.public,
            optimizers=Optimizers(unflatten(kept.pop("optimizer", {}), ":")),
            info=self.info[member.id],
            train=data.train.blank() if blank else data.train,
            test=None if blank else data.test,
            state=ClientState(declared, kept),
            server_encoders=encoders,
        )

    @cached_property
    def _shared(self) -> Model:
        assert self.spec.server_model is not None
        return self.federation.shared_model(self.spec.server_model).to(self.device)

    def _kept(self, client_id: str, version: StateVersion, after: StateVersion | None) -> dict[str, dict[str, Tensor]]:
        keeps = self.spec.algorithm.keeps
        if not keeps or after is None:
            return {}
        current = {key for key, life in keeps.items() if life is Lifetime.RUN or after[0] == version[0]}
        return {key: value for key, value in unflatten(self.store.load(client_id, after)).items() if key in current}

    def _keep(self, client: Client, version: StateVersion, after: StateVersion | None, digest: bytes) -> None:
        keeps = self.spec.algorithm.keeps
        values = {key: dict(value) for key, value in client.state.items()}
        if "model" in keeps or self.spec.keep_models:  # undeclared state is never returned to a client
            values["model"] = client.model.exchanged()
        if "optimizer" in keeps:
            values["optimizer"] = flatten(client.optimizers.kept(), ":")
        self.store.save(client.name, version, flatten(values) | _left_by(digest), after)

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


# ---- protected clients


_LEFT_BY = ".left/by"
"""Key of the digest of the request whose step left a client's state; the states of methods have other keys."""


def _left_by(digest: bytes) -> dict[str, Tensor]:
    """Entry of a state with the digest of its request; empty for clients that are not protected."""
    return {_LEFT_BY: torch.tensor(list(digest), dtype=torch.uint8)} if digest else {}


@dataclass(frozen=True)
class ProtectedSteps:
    """Performs the steps of a site's protected clients.

    The failure of a step may depend on the data as much as its reply does. So the step is charged before it begins,
    and one that fails returns the reply of a client that learns nothing, with noise.

    Attributes:
        site: Site of the clients.
        guard: Clips, adds noise, and charges.
    """

    site: Site
    guard: PrivacyGuard

    def perform(self, step: Performing) -> Payload:
        """Content of a step's reply, charged; it still needs its noise.

        Raises:
            PolyfedError: the request is not covered or beyond the budget, or the step fails on any data.
        """
        site, guard, request, schema = self.site, self.guard, step.request, step.schema
        samples, batch = site.info[step.member.id].samples, step.member.settings.training.batch_size
        step.cost = site.spec.policy.cost(schema, samples, batch)
        step.digest = guard.begin(request, step.received, schema, step.cost, self._before(request))
        try:
            content = site.perform(step, guard.training(step.digest, step.cost))
            schema.require_reply(content)
            content.require_sound(site.limits)
            if schema.kind == "step":
                require_updates(content, step.received)
        except Exception:
            if site.terms.stops:
                raise
            _log.exception("client %s failed in step %s", request.client, request.step)
            if schema.kind != "step":
                raise _undisclosed(request) from None
            return self._unlearnt(step)
        return content

    def _before(self, request: Request) -> bytes:
        """Digest of the request whose step left the client's previous state; empty without one."""
        if not self.site.spec.algorithm.keeps or request.after is None:
            return b""
        kept = self.site.store.load(request.client, request.after).get(_LEFT_BY)
        return b"" if kept is None else bytes(kept.tolist())

    def _unlearnt(self, step: Performing) -> Payload:
        """A reply of the step's layout without information; the client's state stays as it was.

        Raises:
            PayloadError: the step fails with blank samples as well, which reveals nothing of the client's.
        """
        received, returns = step.received, step.schema.returns
        if self.site.keeps_states:
            self._keep_as_it_was(step.request, step.digest)
        training = self.guard.training(step.digest, step.cost, blank=True)
        fields = dict[str, TensorBundle | Scalar]()
        if UPDATE in received.fields:
            fields[UPDATE] = received.fields[UPDATE]
        if training is not None:  # DP-SGD without gradients returns only noise
            fields = dict(self._blank(step, training).fields)
        elif returns.keys() - {UPDATE, EXAMPLES}:
            fields = dict(_zeroed(self._blank(replace(step, received=_zeroed(received)))).fields) | fields
        fields[EXAMPLES] = self.site.info[step.member.id].samples
        return Payload({name: fields[name] for name in returns})

    def _keep_as_it_was(self, request: Request, digest: bytes) -> None:
        store, keeps, after = self.site.store, self.site.spec.algorithm.keeps, request.after
        kept = store.load(request.client, after) if after in store.versions(request.client) else {}
        over = {key for key, life in keeps.items() if life is Lifetime.ROUND and after and after[0] < request.round}
        lasting = {name: value for name, value in kept.items() if name.partition("/")[0] not in over}
        store.save(request.client, (request.round, request.phase), lasting | _left_by(digest), after)

    def _blank(self, step: Performing, training: PrivateTraining | None = None) -> Payload:
        """Content of the step's reply on blank samples."""
        request = step.request
        try:
            made = self.site.perform(step, training, blank=True)
            step.schema.require_reply(made)
        except Exception:
            _log.exception("client %s failed in step %s with blank samples too", request.client, request.step)
            raise _undisclosed(request) from None
        return made


def _undisclosed(request: Request) -> PayloadError:
    return PayloadError(f"step '{request.step}' failed; a protected client does not disclose the cause")


def _zeroed(payload: Payload) -> Payload:
    """The same layout with 0 in place of every floating number of its tensors."""
    fields = dict(payload.fields)
    for name, bundle in payload.bundles.items():
        floating = {key: torch.zeros_like(value) for key, value in bundle.items() if value.is_floating_point()}
        fields[name] = replace(bundle, tensors={**bundle, **floating})
    return Payload(fields)
