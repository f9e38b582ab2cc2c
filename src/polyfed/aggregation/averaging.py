"""How trained weights become new global models: the family of averagings, a setting of methods that average weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.collaboration import Holder, Scope, require_exchangeable
from polyfed.aggregation.exchange import ExactExchange, SequentialExchange, WeightExchange
from polyfed.core.settings import Settings
from polyfed.optim.servers import Models, Replace, ServerOptimizer, State


class Averaging(Settings):
    """Averages what clients have trained: each type of clients (one architecture, task and classes) has a global model.

    Subclasses live in ``polyfed.aggregation.averagings``; they say in ``scope`` what types average with
    each other.
    """

    home: ClassVar[str] = "polyfed.aggregation.averagings"

    mean: Literal["exact", "sequential"] = Field(
        default="exact", description="weighted mean, or one client after the other into the running model, as released"
    )
    server_optimizer: SerializeAsAny[ServerOptimizer] = Field(
        default=Replace(),
        description="how the global models follow the averages: replace, momentum, adam, yogi, adagrad",
    )

    @property
    def scope(self) -> Scope:
        """Which slots types average with each other, and how; none unless a subclass says so."""
        return Scope()

    @property
    def mixes_types(self) -> bool:
        return self.scope.layers != "none" and self.scope.range != "own"

    def require(self, holders: Mapping[str, Holder], shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
        """Check that slots that are to be averaged between types have the same tensors; see ``require_exchangeable``.

        Raises:
            ConfigError: they have not, or nobody has such slots.
        """
        require_exchangeable(holders, shapes, self.scope)

    def start(self, weights: Models, holders: Mapping[str, Holder], asked: Mapping[str, float]) -> WeightExchange:
        """Take up a round's weights as they come; ``asked`` are the samples of the clients that are asked, by type."""
        if self.mean == "exact":
            return ExactExchange(weights, holders, self.scope)
        return SequentialExchange(weights, holders, self.scope, asked)

    def finish(self, exchange: WeightExchange, weights: Models, state: State) -> dict[str, dict[str, Tensor]]:
        """The new global models, after the server optimiser's step; its momenta last in ``state``."""
        # the exchange ends here: its result may share memory with the old models
        return self.server_optimizer.step(weights, exchange.result(), state)
