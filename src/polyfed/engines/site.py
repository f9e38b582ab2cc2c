"""A site: the place where clients live and where their steps execute, whatever engine carries the messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from polyfed.algorithms.algorithm import Algorithm
from polyfed.data.samples import Samples
from polyfed.errors import PolyfedError
from polyfed.federation.client import Client, ClientInfo
from polyfed.federation.federation import Federation, Member
from polyfed.federation.party import Clock, Precision
from polyfed.federation.payload import Artefact, Payload
from polyfed.federation.state import ClientState, Label, Lifetime, StateStore, flatten, unflatten
from polyfed.models.model import Model
from polyfed.randomness import isolated


@dataclass
class _Data:
    train: Samples
    test: Samples | None
    public: Samples | None


@dataclass
class Site:
    """Hosts clients of a federation: builds a client for a step, runs it, keeps what it declares to keep.

    One live model an architecture is resident; a client's weights are copied into it for the step.

    Attributes:
        federation: data and models.
        algorithm: whose client steps are run.
        store: kept states.
        seed, rounds: of the run.
        device: where models run.
        precision: autocast type.
        evaluation_batch: samples a batch without gradients.
    """

    federation: Federation
    algorithm: Algorithm
    store: StateStore
    seed: int
    rounds: int
    device: torch.device
    precision: Precision = "float32"
    evaluation_batch: int = 256
    _models: dict[str, Model] = field(default_factory=dict)
    _data: dict[str, _Data] = field(default_factory=dict)
    _public: dict[str, Samples | None] = field(default_factory=dict)

    @property
    def infos(self) -> tuple[ClientInfo, ...]:
        """Everybody in the federation, in client order."""
        return self.federation.infos

    @cached_property
    def _info(self) -> dict[str, ClientInfo]:
        return {info.id: info for info in self.infos}

    def handle(self, client_id: str, step: str, round_number: int, phase: int, payload: Payload) -> Payload:
        """Run a step for a client and make durable what it keeps; a step that fails changes nothing.

        Raises:
            PolyfedError: no such client or step, or the reply is not finite.
            Exception: whatever the step raises.
        """
        method = getattr(self.algorithm, step, None)
        kind = getattr(method, "__client_step__", None)
        if method is None or kind is None:
            raise PolyfedError(f"'{step}' is not a client step of '{self.algorithm.component_name()}'")
        member = self.federation.members[client_id]
        with isolated(self.seed, round_number, client_id, step, phase):
            client = self._wake(member, (round_number, phase))
            try:
                reply = method(client, **payload.fields)
            finally:
                self._forget_gradients(client)
            if kind == "step" and self.algorithm.keeps:
                reply.payload.require_finite()  # the server checks every reply; this one guards what is kept
                self._keep(client, (round_number, phase))
        return _detached(reply.payload, self._models.get(client.info.architecture))

    def _forget_gradients(self, client: Client) -> None:
        # they are private, and their memory is wanted for the next client
        if (model := self._models.get(client.info.architecture)) is not None:
            model.zero_grad(set_to_none=True)

    def _wake(self, member: Member, label: Label) -> Client:
        kept = self._kept(member.id, label)
        own = kept.pop("model", None)
        data = self._data_of(member)
        declared = {key: life for key, life in self.algorithm.keeps.items() if key not in ("model", "optimizer")}
        return Client(
            name=member.id,
            provide=lambda weights: self._model(member, own if weights is None else weights),
            objective=member.settings.task,
            head_name=member.head,
            training=member.settings.training,
            clock=Clock(self.seed, label[0], self.rounds),
            public=data.public,
            precision=self.precision,
            evaluation_batch=self.evaluation_batch,
            optimizer_state=_groups(kept.pop("optimizer", {})),
            info=self._info[member.id],
            train=data.train,
            test=data.test,
            state=ClientState(declared, kept),
        )

    def _kept(self, client_id: str, label: Label) -> dict[str, dict[str, Tensor]]:
        found = self.store.load(client_id, label) if self.algorithm.keeps else None
        if found is None:
            return {}
        (made, _), entry = found
        current = {key for key, life in self.algorithm.keeps.items() if life is Lifetime.RUN or made == label[0]}
        return {key: value for key, value in unflatten(entry).items() if key in current}

    def _keep(self, client: Client, label: Label) -> None:
        keeps = self.algorithm.keeps
        values = {key: dict(value) for key, value in client.state.items()}
        if "model" in keeps:
            values["model"] = client.model.state_dict()
        if "optimizer" in keeps:
            values["optimizer"] = _joined(client.trainer_states())
        self.store.save(client.name, label, flatten(values))

    def _model(self, member: Member, weights: Mapping[str, Tensor] | None) -> Model:
        key = self._info[member.id].architecture
        if weights is None or key not in self._models:
            self._models[key] = self.federation.client_model(member).to(self.device)
        if weights is not None:
            _load(weights, self._models[key])
        return self._models[key]

    def _data_of(self, member: Member) -> _Data:
        if member.id not in self._data:
            self._data[member.id] = _Data(
                self.federation.train(member), self.federation.test(member), self._public_of(member)
            )
        return self._data[member.id]

    def _public_of(self, member: Member) -> Samples | None:
        key = member.model.architecture
        if key not in self._public:
            views = {modality: encoder.view for modality, encoder in member.model.encoders.items()}
            self._public[key] = self.federation.public_samples(views)
        return self._public[key]


@torch.no_grad()
def _load(weights: Mapping[str, Tensor], model: Model) -> None:
    live = model.state_dict()
    if weights.keys() == live.keys() and all(weights[name].shape == value.shape for name, value in live.items()):
        # what load_state_dict would do, without its walk through all modules
        torch._foreach_copy_(list(live.values()), [weights[name] for name in live])
    else:
        model.load_state_dict(dict(weights))  # raises, and says what does not fit


def _detached(payload: Payload, model: Model | None) -> Payload:
    """The payload with no tensor that shares memory with the model, which serves the next client next."""
    live = list(model.state_dict(keep_vars=True).values()) if model is not None else []
    owners: dict[int, list[Tensor]] = {}
    for tensor in live:
        owners.setdefault(_memory(tensor), []).append(tensor)

    def own(value: Tensor) -> Tensor:
        sharing = owners.get(_memory(value))
        if sharing is None:
            return value
        if len(sharing) == 1 and sharing[0].shape == value.shape:
            # hand the memory over instead of copying it: weights are loaded into the model before its next use
            sharing[0].data = torch.empty_like(sharing[0])
            del owners[_memory(value)]
            return value
        return value.clone()

    def all_own(artefact: Artefact) -> Artefact:
        tensors = {name: own(value) for name, value in artefact.items()}
        return type(artefact)(tensors=tensors, **artefact.attributes())

    return Payload(
        {name: all_own(item) if isinstance(item, Artefact) else item for name, item in payload.fields.items()}
    )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _joined(states: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{name}:{key}": value for name, state in states.items() for key, value in state.items()}


def _groups(joined: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in joined.items():
        name, _, rest = key.partition(":")
        states.setdefault(name, {})[rest] = value
    return states
