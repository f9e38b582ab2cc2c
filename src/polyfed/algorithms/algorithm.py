"""Base of all methods, and the names that methods import."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import Field, SerializeAsAny, model_validator

from polyfed.aggregation.averaging import Averaging
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.federation.client import Client, ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.filters import Ask, Filter, Reply, each
from polyfed.federation.plan import FederationPlan
from polyfed.federation.server import Server
from polyfed.federation.state import Lifetime
from polyfed.models.model import Model
from polyfed.models.slots import encode_slots, model_slots
from polyfed.tasks.task import Task
from polyfed.wire.payload import Logits, Representations, Weights
from polyfed.wire.schema import client_query, client_step, fresh_query

__all__ = [
    "Algorithm",
    "Client",
    "ClientInfo",
    "Cohort",
    "FederationPlan",
    "Lifetime",
    "LocalEpochs",
    "LocalSteps",
    "LocalTraining",
    "Logits",
    "Reply",
    "Representations",
    "Server",
    "WeightAveraging",
    "Weights",
    "client_query",
    "client_step",
    "each",
]


LocalEpochs = Annotated[int, Field(ge=1, description="E, passes over private data per round")]
LocalSteps = Annotated[int | None, Field(ge=1, description="batches per round instead of passes; None: local_epochs")]
WeightAveraging = Annotated[
    SerializeAsAny[Averaging],
    Field(description="averaging of trained weights into global models: by_type, by_slot, by_name, fedcola, fediot"),
]


class LocalTraining(NamedTuple):
    """Local training of a client per round."""

    epochs: int = 1
    """Passes over private data."""
    steps: int | None = None
    """Batches instead of passes; None: as many as the passes have."""
    other_steps: int = 0
    """Batches of further stages of a round that counts batches."""


class Algorithm(Settings):
    """A method of federated learning.

    Its fields are its hyperparameters. It holds no state: what lasts is the server's (model, weights, ``state``) or a
    client's (what ``keeps`` declares). ``round`` is the server half and reads as straight-line code; methods marked
    with ``client_step`` or ``client_query`` are the client half and run wherever the engine puts them.
    """

    home: ClassVar[str] = "polyfed.algorithms"

    @model_validator(mode="before")
    @classmethod
    def _completed_sections(cls, data: Any) -> Any:
        """A section that is given in part keeps the rest of the method's default, as does a component without name."""
        if not isinstance(data, Mapping):
            return data
        fields = {key: field.get_default(call_default_factory=True) for key, field in cls.model_fields.items()}
        return {**data, **_completed(fields, {key: value for key, value in data.items() if key in fields})}

    keeps: ClassVar[Mapping[str, Lifetime]] = {}
    """State that a client keeps: ``model`` and ``optimizer`` are kept and restored by polyfed, other keys are for
    ``client.state``. A client that keeps no model starts every step from its initial weights."""

    has_global_models: ClassVar[bool] = False
    """True if the server has a model for each type of clients, by which these are judged, not by their own."""

    asks_clients: ClassVar[bool] = True
    """True if clients take part in rounds, and not only in evaluations."""

    learns_by_fit: ClassVar[bool] = False
    """True if ``client.fit`` on the task loss is the only training on private data, so that DP-SGD covers every reply.
    Not inherited: a subclass must set it again."""

    sends_parts: ClassVar[bool] = False
    """True if ``weights`` that clients are sent may be a part of their models; institutions refuse others."""

    takes_late_replies: ClassVar[bool] = False
    """True if replies may answer requests of earlier rounds (``run.pace``): trained ``weights`` as if started from the
    present model, all else unchanged, with ``Reply.mixing``."""

    needs_public: ClassVar[bool] = False
    """True if the method needs a public set."""

    needs_server: ClassVar[bool] = False
    """True if the method needs a server model."""

    needs_adapter: ClassVar[str] = ""
    """Name of the adapter that every client's model must have; empty: none."""

    shares_encoders: ClassVar[bool] = False
    """True if clients receive the server's encoders, and so its architecture (``Client.server_encoders``)."""

    def observers(self, server: Server) -> Sequence[Filter[Ask]]:
        """Filters that record figures of the replies of each ask and pass these on unchanged."""
        return ()

    def add_modules(self, model: Model) -> None:
        """Add the method's own modules to a client's new model, as ``model.extras``; draws from torch's global
        generator.

        Raises:
            ConfigError: the method cannot train such a model.
        """

    @property
    def local_training(self) -> LocalTraining | None:
        """Local training of a round, for schedules, twins and analyses. None: unknown.

        By default ``local_epochs``, or ``local_steps`` if there are any.
        """
        epochs, steps = getattr(self, "local_epochs", None), getattr(self, "local_steps", None)
        return None if epochs is None and steps is None else LocalTraining(epochs or 1, steps)

    @property
    def rounds_without_clients(self) -> int:
        """First rounds in which no client trains, for twins."""
        return 0

    @property
    def server_passes(self) -> int | None:
        """Passes over P that the server trains per round, on its task or to distil, for twins. None: unknown."""
        return None if self.needs_public else 0

    @property
    def counts_epochs(self) -> bool:
        """True if clients train for epochs, not for a number of steps."""
        return self.local_training is None or self.local_training.steps is None

    @property
    def epochs_a_round(self) -> int:
        """Epochs by which a round advances schedules: those of local training, or 1 for local steps."""
        training = self.local_training
        return 1 if training is None or training.steps is not None else training.epochs

    @property
    def is_personal(self) -> bool:
        """True if ``evaluate_clients`` judges clients' own models, which change only when they take part."""
        return "model" in self.keeps and not self.has_global_models

    @model_validator(mode="after")
    def _epochs_or_steps(self) -> Self:
        field = type(self).model_fields.get("local_epochs")
        epochs, steps = getattr(self, "local_epochs", None), getattr(self, "local_steps", None)
        if field and steps is not None and epochs != field.default:
            raise ValueError(f"local_epochs has no effect with local_steps; leave it at {field.default}")
        return self

    def setup(self, server: Server) -> None:
        """Called once before the first round of a run, not on resume; checks of settings belong into ``require``."""

    @abstractmethod
    def round(self, server: Server, cohort: Cohort) -> None:
        """One communication round."""

    def evaluate_clients(self, server: Server, cohort: Cohort) -> Mapping[str, Mapping[str, float]]:
        """Every asked client's own test metrics, by client id."""
        weights = each(lambda client: self.judged(server, client))
        replies = cohort.ask(self.assess_global, weights=weights) if self.has_global_models else cohort.ask(self.assess)
        return {reply.sender.id: reply.payload.scalars for reply in replies}  # type: ignore[misc]

    def judged(self, server: Server, client: ClientInfo) -> Weights:
        """Weights by which a client of a method with global models is judged."""
        return server.weights_for(client)

    @client_query(float)
    def assess(self, client: Client) -> Reply:
        """Evaluate the client's model on the client's test samples."""
        return Reply(**(client.evaluate(client.test) if client.test is not None else {}))

    @client_query(float)
    def assess_global(self, client: Client, weights: Weights) -> Reply:
        """Evaluate the received model on the client's test samples."""
        client.load_weights(weights)
        return self.assess(client)

    @fresh_query(weights=Weights, slots=str)
    def initial(self, client: Client) -> Reply:
        """The client's initial weights and their slots, by which a server learns of a new architecture."""
        return Reply(weights=client.weights, slots=encode_slots(model_slots(client.model)))

    def require(self, plan: FederationPlan) -> None:
        """Check that the federation suits the method, by settings alone.

        Raises:
            ConfigError: it does not; the message names what is missing.
        """
        if self.needs_public and plan.public is None:
            raise ConfigError(f"algorithm '{self.component_name()}' needs a public set; add a 'public' section")
        if self.needs_server and plan.server is None:
            raise ConfigError(f"algorithm '{self.component_name()}' needs a server model; add a 'server' section")
        if isinstance(averaging := getattr(self, "averaging", None), Averaging):
            averaging.require_adapters(list(plan.models()))
        if self.needs_adapter:
            for group, model in plan.models():
                names = [adapter.component_name() for adapter in model.adapters]
                if self.needs_adapter not in names and not model.is_foreign:
                    raise ConfigError(
                        f"algorithm '{self.component_name()}' trains adapters '{self.needs_adapter}', and a model of "
                        f"clients.{group} has none; give an encoder 'hf' of it one, or choose fedavg"
                    )

    def require_task(self, where: str, task: Task) -> None:
        """Raise ConfigError, which names the setting ``where``, if clients cannot be trained on this task."""


def _completed(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Given values, sections completed by their defaults, as are components in them without a name."""
    completed = dict(given)
    for key, value in given.items():
        default = defaults.get(key)
        if not isinstance(default, Settings) or not isinstance(value, Mapping):
            continue
        own = dict(default)
        if default.home and "name" not in value:
            completed[key] = {"name": default.component_name(), **own, **value}
        elif not default.home:
            components = {name: one for name, one in own.items() if isinstance(one, Settings) and one.home}
            completed[key] = {**own, **_completed(components, value)}
    return completed
