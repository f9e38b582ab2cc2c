"""FedCola."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Literal

from pydantic import Field
from torch import Tensor

from polyfed.aggregation.averagings.tensors import CollaborativeAveraging, require_equal
from polyfed.aggregation.mean import WeightedMean
from polyfed.algorithms.algorithm import Client, Cohort, Reply, Server, WeightAveraging, Weights, client_step, each
from polyfed.algorithms.fedavg import FedAvg
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.models.blocks import ROLES, gated, linears
from polyfed.models.slots import Slot

_NONE = Weights({})


class Complement(Settings):
    """Complementary local training (section 4.2): clients of one modality train with another's block weights W_out."""

    layers: Literal["attention", "mlp", "blocks"] = Field(
        default="blocks", description="linear layers that get another modality's weights behind a gate"
    )
    train_out: bool = Field(default=True, description="whether the other modality's weights W_out are trained")
    first_out: Literal["other", "own"] = Field(
        default="other", description="W_out in round 1; own: a copy of the client's own initial weights, as released"
    )
    send: Literal["weights", "modules"] = Field(
        default="weights",
        description="what crosses for W_out: the matrices in use, or whole modules, whose bytes the paper counts",
    )

    # ---- server half

    def sources(self, server: Server, type_name: str) -> list[str]:
        """Types whose weights complement a type's: those of one other modality; none if it has several itself."""
        own = server.types[type_name].modalities
        if len(own) > 1:
            return []
        return [name for name, other in server.types.items() if len(other.modalities) == 1 and other.modalities != own]

    def require(self, server: Server) -> None:
        """Check that types have the layers that complement each other, of equal shapes.

        Raises:
            ConfigError: naming clients and layers.
        """
        models = server.global_models.by_type()
        for type_name, source in [(name, source) for name in server.types for source in self.sources(server, name)]:
            (own,), (other,) = server.types[type_name].modalities, server.types[source].modalities
            roles = sorted({slot.role for slot in models[type_name].keys} & ROLES[self.layers])
            if not roles:
                raise ConfigError(
                    f"algorithm.complement.layers is '{self.layers}', but clients of type '{type_name}' have no such "
                    "layers; give them encoders 'blocks', or set algorithm.complement=null"
                )
            for role in roles:
                require_equal(models[type_name], Slot(own, role), models[source], Slot(other, role))

    def out_weights(self, server: Server, type_name: str) -> Weights:
        """W_out of a type by name within its encoder; the mean by sample count where several types complement it.

        Empty where none does: clients of several modalities, or alone with their modality.
        """
        sources = self.sources(server, type_name)
        # released: in round 1 the gate opens on a copy of the own weights
        if sources and self.first_out == "own" and server.clock.round == 1:
            sources = [type_name]
        if not sources:
            return Weights({})
        mean = WeightedMean()
        for name in sources:
            mean.add(self._blocks(server, name), server.weight(*server.types[name].clients))
        return Weights(self._blocks(server, sources[0]) if len(sources) == 1 else mean.take())

    def _blocks(self, server: Server, type_name: str) -> dict[str, Tensor]:
        tensors = server.weights[type_name]
        return {
            key: tensors[name]
            for slot, keys in server.global_models.by_type()[type_name].keys.items()
            if slot.role in ROLES[self.layers] and slot.modality in server.types[type_name].modalities
            for key, name in keys.items()
            if self.send == "modules" or tensors[name].ndim == 2
        }

    # ---- client half

    def gates(self, client: Client, others: Weights) -> AbstractContextManager[object]:
        """W + g W_out in place of W, and afterwards as W, in the one encoder that the client has."""
        (modality,) = client.modalities
        encoder = client.model.encoders[modality]
        layers = linears(encoder, ROLES[self.layers])
        return gated(encoder, {name: others[f"{name}.weight"] for name in layers}, trainable=self.train_out)


class FedCola(FedAvg):
    """Federated modality complementary and collaboration (Sun et al., ECCV 2024).

    Transformers of equal blocks, a global model for each type of client, no public data. Clients of one modality
    train with another modality's block weights behind gates (complementary local training, section 4.2); the server
    averages attention over all types that share a modality and scales the rest to match (collaborative aggregation
    with compensation, section 4.3). Clients of several modalities train plainly.

    Defaults are the paper's, but for ``complement.send``, which changes bytes alone; where the released code differs,
    the other behaviour is an option, and the preset ``fedcola-released`` has them all.

    >>> method = FedCola(averaging={"name": "fedcola", "layers": "blocks"})
    >>> method.averaging.compensation, method.complement.train_out
    (True, True)
    """

    averaging: WeightAveraging = CollaborativeAveraging()
    complement: Complement | None = Field(default=Complement(), description="complementary local training; null: none")

    # ---- server half

    def setup(self, server: Server) -> None:
        """Start common weights.

        Raises:
            ConfigError: types that are to exchange layers cannot.
        """
        super().setup(server)
        if self.complement is not None:
            self.complement.require(server)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast own models and W_out, train, uni-aggregation (section 3), collaborative aggregation (4.3)."""

        @cache  # W_out is the same for all clients of a type
        def out_weights(type_name: str) -> Weights:
            return self.complement.out_weights(server, type_name) if self.complement else Weights({})

        means = server.new_means(self.averaging, cohort)
        for reply in cohort.ask(
            self.fit,
            weights=each(server.weights_for),
            others=each(lambda client: out_weights(server.type_of(client))),  # W_out (section 4.2)
        ):
            means[reply.type].add(reply.weights, reply.num_examples)  # uni-aggregation
        server.update_weights(server.averaged(self.averaging, means))  # w + Omega of it

    # ---- client half

    @client_step(weights=Weights, num_examples=int, mean_by="num_examples", name="complemented_fit")
    def fit(self, client: Client, weights: Weights, others: Weights = _NONE) -> Reply:
        """Train with W + g W_out in place of W, then send W + g W_out as W (section 4.2, compression trick)."""
        client.load_weights(weights)
        # only clients of one modality are sent others' weights
        with self.complement.gates(client, others) if self.complement and others else nullcontext():
            client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(weights=client.weights, num_examples=client.num_examples)
