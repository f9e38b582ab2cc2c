"""FedCola."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.averaging import Averaging, CollaborativeAveraging
from polyfed.aggregation.collaboration import require_equal
from polyfed.aggregation.mean import WeightedMean
from polyfed.algorithms.algorithm import Client, Cohort, Reply, Server, Weights, client_step, each
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.shared.global_models import holders_of
from polyfed.core.effects import Not, Only
from polyfed.core.errors import ConfigError
from polyfed.models.gates import ROLES, gated, linears
from polyfed.models.slots import Slot

_COMPLEMENTS = Only(complement=Not("none"))


class FedCola(FedAvg):
    """Federated modality complementary and collaboration (Sun et al., ECCV 2024).

    Transformers of equal blocks, a global model for each type of client, no public data. Clients of one modality
    train with another modality's block weights behind gates (complementary local training, section 4.2); the server
    averages attention over all types that share a modality and scales the rest to match (collaborative aggregation
    with compensation, section 4.3). Clients of several modalities train plainly.

    Defaults are the paper's; where the released code differs, the other behaviour is an option, and the preset
    ``fedcola-released`` has them all.
    """

    averaging: SerializeAsAny[Averaging] = Field(
        default=CollaborativeAveraging(),
        description="how weights become the global models; the paper's: fedcola",
    )
    complement: Literal["none", "attention", "mlp", "blocks"] = Field(
        default="blocks", description="linear layers that get another modality's weights behind a gate"
    )
    train_out: Annotated[bool, _COMPLEMENTS] = Field(
        default=True, description="whether the other modality's weights W_out are trained or frozen"
    )
    first_out: Annotated[Literal["other", "own"], _COMPLEMENTS] = Field(
        default="other", description="W_out in round 1; own: a copy of the client's own initial weights, as released"
    )
    send: Annotated[Literal["weights", "modules"], _COMPLEMENTS] = Field(
        default="weights",
        description="what crosses for W_out: the matrices in use, or whole modules, whose bytes the paper counts",
    )

    @property
    def mixes_types(self) -> bool:
        """Also by the other modality's weights, which W_out are."""
        return super().mixes_types or self.complement != "none"

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {**super().summed, "complemented_fit": "num_examples"}

    # ---- server half

    def setup(self, server: Server) -> None:
        """Start common weights.

        Raises:
            ConfigError: types that are to exchange layers cannot.
        """
        super().setup(server)
        for kind in server.types if self.complement != "none" else ():
            for source in self.sources(server, kind):
                self._require_complement(server, kind, source)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast own models and complements, train, uni-aggregation, collaborative aggregation (section 4.1)."""

        @cache
        def out(kind: str) -> Weights:
            return self.out_weights(server, kind)

        # W_out is the same for all clients of a type: computed once, in `out`
        weights, others = each(server.weights_for), each[Weights](lambda client: out(server.type_of(client)))
        replies = cohort.ask(self.complemented_fit, check=self.shape_check(server), weights=weights, others=others)
        self.aggregate(server, cohort, replies)

    def sources(self, server: Server, kind: str) -> list[str]:
        """Types whose weights complement a type's: those of one other modality; none if it has several itself."""
        own = server.types[kind].modalities
        if len(own) > 1 or self.complement == "none":
            return []
        return [name for name, other in server.types.items() if len(other.modalities) == 1 and other.modalities != own]

    def out_weights(self, server: Server, kind: str) -> Weights:
        """W_out of a type by name within its encoder; the mean by sample count where several types complement it.

        Empty where none does: clients of several modalities, or alone with their modality.
        """
        sources = self.sources(server, kind)
        # released: in round 1 the gate opens on a copy of the own weights
        if sources and self.first_out == "own" and server.clock.round == 1:
            sources = [kind]
        if not sources:
            return Weights({})
        mean = WeightedMean()
        for name in sources:
            mean.add(self._blocks(server, name), server.weight(*server.types[name].clients))
        return Weights(self._blocks(server, sources[0]) if len(sources) == 1 else mean.take())

    def _blocks(self, server: Server, kind: str) -> dict[str, Tensor]:
        tensors = server.weights[kind]
        return {
            key: tensors[name]
            for slot, keys in holders_of(server)[kind].keys.items()
            if slot.role in ROLES[self.complement]
            for key, name in keys.items()
            if self.send == "modules" or tensors[name].ndim == 2
        }

    def _require_complement(self, server: Server, kind: str, source: str) -> None:
        holders = holders_of(server)
        (own,), (other,) = server.types[kind].modalities, server.types[source].modalities
        roles = sorted({slot.role for slot in holders[kind].keys} & ROLES[self.complement])
        if not roles:
            raise ConfigError(
                f"algorithm.complement is '{self.complement}', but clients of type '{kind}' have no such layers; "
                "give them encoders 'blocks', or set algorithm.complement=none"
            )
        for role in roles:
            require_equal(holders[kind], Slot(own, role), holders[source], Slot(other, role))

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def complemented_fit(self, client: Client, weights: Weights, others: Weights) -> Reply:
        """Train with W + g W_out in place of W, then send W + g W_out as W (section 4.2, compression trick)."""
        client.load_weights(weights)
        if not others:
            self.train(client)
        else:
            # only clients of one modality are sent others' weights
            (encoder,) = client.model.encoders.values()
            layers = linears(encoder, ROLES[self.complement])
            with gated(encoder, {name: others[f"{name}.weight"] for name in layers}, trainable=self.train_out):
                self.train(client)
        return Reply(weights=Weights(client.model.exchanged()), num_examples=client.num_examples)
