"""A client: its public profile and its local state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from torch import Tensor

from polyfed.core.activity import SERVER as SERVER
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.data.samples import Batch, Samples
from polyfed.federation.participant import Participant
from polyfed.federation.state import ClientState
from polyfed.models.model import Embedder, Model
from polyfed.privacy.private_training import PrivateTraining
from polyfed.wire.payload import Weights

_ID = r"(?!\.)[^/\\\x00-\x1f\x7f]{1,128}"
_LONGEST = 4096  # characters of an architecture's name, which lists what it is made of
_MOST = 1 << 63
_BATCHES = 100_000  # of one pass; what privacy costs is computed from it, and more would take hours


@dataclass(frozen=True)
class ClientInfo:
    """Public profile of a client, all that the server sees of it.

    Attributes:
        id: name of the client, the same on every engine and in every start.
        group: name of its group in the configuration.
        modalities: modalities that its samples have and its model encodes.
        task: name of its task.
        samples: number of its training samples.
        batch_size: samples of a batch of its training.
        architecture: name of its model's architecture.
    """

    id: str = field(metadata={"label": "name"})
    group: str = field(metadata={"label": "group"})
    modalities: tuple[str, ...] = field(metadata={"label": "modalities"})
    task: str = field(metadata={"label": "task"})
    samples: int = field(metadata={"label": "number of training samples"})
    batch_size: int = field(metadata={"label": "samples per batch"})
    architecture: str = field(
        metadata={"label": "architecture with the number of classes and a keyed digest of their names"}
    )

    @classmethod
    def labels(cls) -> dict[str, str]:
        """Maps fields to words for what a site sends in them when it joins."""
        return {one.name: one.metadata["label"] for one in fields(cls)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ClientInfo:
        """The description that a client's site sent.

        Raises:
            PayloadError: it is not one.
        """
        try:
            info = cls(**{**entry, "modalities": tuple(entry["modalities"])})
        except (KeyError, TypeError) as error:
            raise PayloadError(f"not the description of a client: {error}") from error
        _require_id(info.id)
        texts = (info.id, info.group, info.task, info.architecture, *info.modalities)
        if not all(isinstance(text, str) and len(text) <= _LONGEST and text.isprintable() for text in texts):
            raise PayloadError(f"not the description of a client: texts are not up to {_LONGEST} printable characters")
        for name, number in (("samples", info.samples), ("batch_size", info.batch_size)):
            if type(number) is not int or not 1 <= number < _MOST:
                raise PayloadError(f"not the description of a client: {name} is {str(number)[:40]}, not 1 to 2^63")
        if info.samples > _BATCHES * info.batch_size:
            what = f"not the description of a client: samples is {info.samples}"
            raise PayloadError(f"{what}, more than {_BATCHES:,} batches of {info.batch_size}")
        return info


def _require_id(value: object) -> None:
    # files are called after ids, so they are words that no path can hide in
    if not isinstance(value, str) or not re.fullmatch(_ID, value):
        raise PayloadError(f"{value!r} cannot be the id of a client; give a word without '/' or control characters")
    if value == SERVER:
        raise PayloadError(f"a client cannot be called '{SERVER}'; rename its group")


class ServerEncoders(Protocol):
    """The server's encoders at a client: their architecture, and the client's data as they see them."""

    def model(self, weights: Mapping[str, Tensor]) -> Model:
        """The encoders with these weights, frozen, in evaluation mode, on the client's device."""

    @property
    def train(self) -> Samples:
        """The client's training samples in the encoders' views, of the modalities that both have."""

    @property
    def test(self) -> Samples | None:
        """Its test samples likewise."""


@dataclass(frozen=True)
class Protection:
    """Noise that hides a client's reply, which then has the same layout whatever the data are.

    Attributes:
        training: trains in place of the client, by gradients with noise, where samples are protected one by one.
    """

    training: PrivateTraining | None = None


@dataclass(kw_only=True)
class Client(Participant):
    """A client during one step; rebuilt for every step from its data and its kept state.

    Attributes:
        info: public profile, all that the server sees.
        train: its private training samples.
        test: its test samples, if it has any.
        state: the values that the algorithm declares to keep on a client.
        server_encoders: the server's encoders, for methods that send them.
        protection: what protects its samples or its reply, in runs with ``privacy``.
    """

    info: ClientInfo
    train: Samples
    test: Samples | None
    state: ClientState = field(default_factory=lambda: ClientState({}, {}))
    server_encoders: ServerEncoders | None = None
    protection: Protection | None = None

    def fit(self, samples: Samples, *, epochs: int, steps: int | None = None, **more: Any) -> int:
        """``Participant.fit``, with DP-SGD where the run protects samples."""
        if self.protection is None or self.protection.training is None:
            return super().fit(samples, epochs=epochs, steps=steps, **more)
        added = [name for name in ("regulariser", "correct", "once") if more.get(name)]
        if added or more.get("task_weight", 1.0) != 1:
            raise ConfigError("privacy.samples protects training on the task alone, and the method adds to it")
        self.prepare_task()  # not among gradients of single samples
        return self.protection.training.fit(self, samples, epochs, steps)

    def task_loss(self, batch: Batch, model: Embedder | None = None) -> Tensor:
        """``Participant.task_loss``; refused where the run protects samples, as nothing would clip its gradient."""
        if self.protection is not None and self.protection.training is not None:
            raise ConfigError("privacy.samples protects what client.fit learns, and the method trains by itself")
        return super().task_loss(batch, model)

    @property
    def weights(self) -> Weights:
        """Tensors of the model that are exchanged, with their present values."""
        return Weights(self.model.exchanged())

    @property
    def num_examples(self) -> int:
        """Number of private training samples that the task has a use for."""
        return len(self.task.usable(self.train)) if self.setup.task is not None else len(self.train)

    @property
    def steps_an_epoch(self) -> int:
        """Number of private batches in a pass; a last batch of one sample is left out."""
        full, last = divmod(len(self.train), self.training.batch_size)
        return full + (last > 1)
