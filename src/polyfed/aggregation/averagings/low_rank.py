"""Averagings of low-rank adapters.

A layer W is adapted by s B A, with A [r, in], B [out, r] and one scaling s for all clients. Averages of A and of B give
another change than the average of the changes B A; rules differ in what they do about it, and about unequal ranks.
Means are over all clients, of whatever type, that have a layer of that name; so are those of all other tensors of one
name and shape.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from jaxtyping import Float
from pydantic import AfterValidator, model_validator
from torch import Tensor

from polyfed.aggregation.averaging import Averages, Averaging, Mean, ModelsByType, SharedMean, require_one_frozen
from polyfed.aggregation.mean import WeightedMean
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.models.adapters.adapter import LoRA
from polyfed.models.model import ModelSettings

_FACTOR = re.compile(r"(.+)\.lora_([AB])\.default\.weight")
OFFSET = "base_layer.offset"
"""Name of a layer's offset: a change in units of B A (``models.adapters.adapter.OffsetLinear``)."""


class Factors(NamedTuple):
    """A layer's adapter.

    >>> Factors(a=torch.ones(2, 3), b=torch.ones(4, 2)).change.shape
    torch.Size([4, 3])
    """

    a: Float[Tensor, "r in"]
    b: Float[Tensor, "out r"]

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def change(self) -> Float[Tensor, "out in"]:
        return self.b @ self.a


class FactorNames(NamedTuple):
    """Names of the tensors of a layer's adapter; the offset may be missing."""

    a: str
    b: str
    offset: str


def factor_names(names: Iterable[str]) -> dict[str, FactorNames]:
    """Adapted layer -> names of its factors, of the tensors of a model.

    >>> names = factor_names(["q.lora_A.default.weight", "q.lora_B.default.weight", "head.bias"])
    >>> list(names), names["q"].b
    (['q'], 'q.lora_B.default.weight')
    """
    matches = [match for name in names if (match := _FACTOR.fullmatch(name))]
    named: dict[str, dict[str, str]] = {}
    for match in matches:
        named.setdefault(match[1], {})[match[2]] = match[0]
    return {layer: FactorNames(own["A"], own["B"], f"{layer}.{OFFSET}") for layer, own in named.items()}


def _without_rank(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Part of a shape that does not depend on the rank."""
    match = _FACTOR.fullmatch(name)
    return shape if match is None else shape[1:] if match[2] == "A" else shape[:1]


def without(names: Iterable[str], *, factor: str = "", offsets: bool = False) -> frozenset[str]:
    """Names of tensors without those of a factor (``a`` or ``b``) or those of offsets.

    >>> sorted(without(["q.lora_A.default.weight", "q.lora_B.default.weight", "head.bias"], factor="a"))
    ['head.bias', 'q.lora_B.default.weight']
    """
    names = frozenset(names)
    own = factor_names(names).values()
    left = {getattr(layer, factor) for layer in own} if factor else set()
    return names - left - ({layer.offset for layer in own} if offsets else set())


def leading(factors: Factors, rank: int) -> Factors:
    """The first ``rank`` directions, or all and zeros.

    >>> factors = Factors(a=torch.ones(2, 3), b=torch.ones(4, 2))
    >>> leading(factors, 1).rank, leading(factors, 3).a[2].tolist()
    (1, [0.0, 0.0, 0.0])
    """
    missing = max(0, rank - factors.rank)
    a = torch.cat([factors.a[:rank], factors.a.new_zeros(missing, factors.a.shape[1])])
    return Factors(a, torch.cat([factors.b[:, :rank], factors.b.new_zeros(len(factors.b), missing)], dim=1))


def fresh(tensors: Mapping[str, Tensor], *key: int | str) -> dict[str, Tensor]:
    """New factors of every layer, by names: A uniform as ``peft`` has it, from the key and the layer's name, B zero.

    >>> tensors = {"q.lora_A.default.weight": torch.ones(2, 3), "q.lora_B.default.weight": torch.ones(4, 2)}
    >>> new = fresh(tensors, 0)
    >>> bool(new["q.lora_B.default.weight"].any()), new["q.lora_A.default.weight"].shape
    (False, torch.Size([2, 3]))
    """
    new = {}
    for layer, own in factor_names(tensors).items():
        a, b = tensors[own.a], tensors[own.b]
        draw = torch.rand(a.shape, generator=generator("factors", *key, layer))
        new[own.a], new[own.b] = ((2 * draw - 1) * a.shape[1] ** -0.5).to(a), torch.zeros_like(b)
    return new


def best_factors(change: Float[Tensor, "out in"], rank: int) -> Factors:
    """The factors whose product is nearest to a change (Eckart and Young, 1936), singular values with B.

    >>> change = torch.diag(torch.tensor([3.0, 1.0]))
    >>> [[round(float(x), 2) + 0.0 for x in best_factors(change, rank).change.diagonal()] for rank in (1, 2)]
    [[3.0, 0.0], [3.0, 1.0]]
    """
    u, s, v = torch.linalg.svd(change.float(), full_matrices=False)
    return leading(Factors(v, u * s), rank)


class LowRankAveraging(Averaging):
    """Averages adapters layer by layer; subclasses define the averaged tensors and the new adapters."""

    between_types = crosses_types = True
    is_of_changes = True
    has_offset: ClassVar[bool] = False
    needs_equal_ranks: ClassVar[bool] = False

    @model_validator(mode="after")
    def _is_exact(self) -> Self:
        if self.mean != "exact":
            raise ValueError("mean: sequential interpolates tensors, this rule averages layers; leave it at exact")
        return self

    def fold(self, mean: Any, factors: Factors, weight: float) -> Any:
        """The mean of a layer over the clients so far and one more.

        Args:
            mean: mean so far, or None; a running mean of ``averaged``, or a subclass's own.
            factors: factors of the client's adapter.
            weight: n_c, number of samples of the client.
        """
        mean = mean or WeightedMean()
        mean.add(self.averaged(factors), weight)
        return mean

    def averaged(self, factors: Factors) -> dict[str, Tensor]:
        """Tensors of a layer's adapter that are averaged; by default its change."""
        return {"change": factors.change}

    @abstractmethod
    def factors(self, mean: Any, old: Factors) -> Factors:
        """A layer's new adapter, of the rank of the old one of a type, from the clients' ``mean``."""

    def offset(self, mean: Any, new: Factors) -> Float[Tensor, "out in"] | None:
        """Change that the new adapter leaves out, to be added to the layer for good; None: nothing."""
        return None

    def new_means(self, models: ModelsByType, asked: Mapping[str, float]) -> Mapping[str, Mean]:
        shared = dict[str, Any](), SharedMean()
        return {name: AdapterMean(self, model.weights, *shared) for name, model in models.items()}

    def average(self, models: ModelsByType, means: Mapping[str, Any]) -> Averages:
        first: AdapterMean = next(iter(means.values()))
        averages = first.others.averages(models)
        for type_name, model in models.items():
            old, new = model.weights, averages[type_name]
            for layer, names in factor_names(old).items():
                if layer in first.layers:
                    given, mean = Factors(old[names.a], old[names.b]), first.layers[layer]
                    made = self.factors(mean, given)
                    new[names.a], new[names.b] = made.a.to(given.a), made.b.to(given.b)
                    if names.offset in old and (left := self.offset(mean, made)) is not None:
                        new[names.offset] = old[names.offset] + left.to(old[names.offset])
        return averages

    def require_adapters(self, models: Sequence[tuple[str, ModelSettings]]) -> None:
        """See ``Averaging``."""
        adapters = [(name, one) for name, model in models for one in model.adapters if isinstance(one, LoRA)]
        self._require_some(not models or bool(adapters) or any(model.is_foreign for _, model in models))
        for name, adapter in adapters:
            self._require_fit(f"of '{name}'", has_offset=adapter.offset)

    def require(self, models: ModelsByType) -> None:
        require_one_frozen(models, _without_rank)
        for model in models.values():
            has_offset = all(own.offset in model.weights for own in factor_names(model.weights).values())
            self._require_fit(", ".join(model.clients[:3]), has_offset=has_offset)
        ranks: dict[str, int] = {}
        for model in models.values():
            for layer, own in factor_names(model.weights).items():
                rank = len(model.weights[own.a])
                if rank != ranks.setdefault(layer, rank) and self.needs_equal_ranks:
                    raise ConfigError(
                        f"algorithm.averaging '{self.component_name()}' needs adapters of one rank, and those of "
                        f"'{layer}' are {ranks[layer]} and, of client {model.clients[0]}, {rank}; make adapter.rank "
                        "alike, or choose the method flexlora, hetlora or flora"
                    )
        self._require_some(bool(ranks))

    def _require_some(self, are_there: bool) -> None:
        if not are_there:
            raise ConfigError(
                f"algorithm.averaging is '{self.component_name()}', but no client's model has low-rank adapters; give "
                "encoders 'hf' an adapter 'lora', or choose by_type"
            )

    def _require_fit(self, clients: str, *, has_offset: bool) -> None:
        if self.has_offset and not has_offset:
            raise ConfigError(
                f"algorithm.averaging '{self.component_name()}' adds to layers for good, and clients {clients} do not "
                "exchange that; set adapter.offset: true in their encoders"
            )


@dataclass
class AdapterMean:
    """Means of the adapters of each layer, and of all other tensors, over the clients so far.

    Attributes:
        rule: rule of the means.
        old: global model of the type whose clients are added; a factor that they do not send is as it was.
        layers: layer -> mean of its adapters; shared by all types.
        others: mean of all other tensors; shared by all types.
    """

    rule: LowRankAveraging
    old: Mapping[str, Tensor]
    layers: dict[str, Any]
    others: SharedMean

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Fold the next client in; its tensors are not kept."""
        if weight > 0:
            adapters = factor_names(self.old)
            for layer, (a, b, _) in adapters.items():
                factors = Factors(*(tensors.get(name, self.old[name]).float() for name in (a, b)))
                self.layers[layer] = self.rule.fold(self.layers.get(layer), factors, weight)
            of_adapters = {name for layer in adapters.values() for name in layer}
            self.others.add({name: value for name, value in tensors.items() if name not in of_adapters}, weight)


def only(rule: type[LowRankAveraging]) -> AfterValidator:
    """Validator that allows a method one averaging only, with any settings."""

    def check(averaging: Averaging) -> Averaging:
        if not isinstance(averaging, rule):
            name = rule.component_name()
            raise ValueError(f"is {averaging.component_name()}, but the method goes with '{name}'; leave the name out")
        return averaging

    return AfterValidator(check)


class Separate(LowRankAveraging):
    """FedIT (Zhang et al., ICASSP 2024): the means of A and of B, whose product is not the mean of the changes."""

    short_name: ClassVar[str] = "separate"
    is_of_changes = False
    needs_equal_ranks = True

    def averaged(self, factors: Factors) -> dict[str, Tensor]:
        return factors._asdict()

    def factors(self, mean: WeightedMean, old: Factors) -> Factors:
        return Factors(**mean.result())


class Residual(LowRankAveraging):
    """FedEx-LoRA (Singhal et al., ACL 2025, Eq. 10 to 13): the means of A and of B, and what their product leaves out.

    W_0 <- W_0 + s (mean(B A) - mean(B) mean(A)): the layer becomes the average of the clients' layers.
    """

    short_name: ClassVar[str] = "residual"
    has_offset = needs_equal_ranks = True

    def averaged(self, factors: Factors) -> dict[str, Tensor]:
        return {**factors._asdict(), "change": factors.change}

    def factors(self, mean: WeightedMean, old: Factors) -> Factors:
        means = mean.result()
        return Factors(means["a"], means["b"])

    def offset(self, mean: WeightedMean, new: Factors) -> Float[Tensor, "out in"]:
        return mean.result()["change"] - new.change


class Stacked(LowRankAveraging):
    """FLoRA (Wang et al., NeurIPS 2024, Eq. 6 to 8): factors side by side, added to the layer for good.

    [n_1 B_1 ... n_K B_K] [A_1; ...; A_K] / n is the mean of the changes, whatever the ranks; new adapters are zero.
    """

    short_name: ClassVar[str] = "stacked"
    has_offset = True

    def factors(self, mean: WeightedMean, old: Factors) -> Factors:
        return Factors(old.a, torch.zeros_like(old.b))

    def offset(self, mean: WeightedMean, new: Factors) -> Float[Tensor, "out in"]:
        return mean.result()["change"]


class SingularValues(LowRankAveraging):
    """FlexLoRA (Bai et al., NeurIPS 2024, Algorithm 1): a type gets the factors of its rank nearest to the mean."""

    short_name: ClassVar[str] = "singular_values"

    def factors(self, mean: WeightedMean, old: Factors) -> Factors:
        return best_factors(mean.result()["change"], old.rank)


class Padded(LowRankAveraging):
    """HetLoRA (Cho et al., EMNLP 2024, Eq. 2 to 4): factors filled up with zeros, weighted by n_c and the norm of B A.

    Each type gets the first directions, as many as its rank.
    """

    short_name: ClassVar[str] = "padded"

    def fold(self, mean: tuple[Factors, float] | None, factors: Factors, weight: float) -> tuple[Factors, float]:
        old, total = mean or (Factors(torch.zeros_like(factors.a), torch.zeros_like(factors.b)), 0.0)
        size = weight * float(torch.linalg.matrix_norm(factors.change))
        total += size
        share, rank = size / total if total > 0 else 0.0, max(old.rank, factors.rank)
        pairs = zip(leading(old, rank), leading(factors, rank), strict=True)
        return Factors(*(torch.lerp(before, own, share) for before, own in pairs)), total

    def factors(self, mean: tuple[Factors, float], old: Factors) -> Factors:
        # where no client's B has moved, all weigh nothing, and a mean of nothing could never be learnt from again
        return leading(mean[0], old.rank) if mean[1] else old
