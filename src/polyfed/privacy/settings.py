"""Differential privacy of what clients send: settings, and which fields of a reply they cover."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Place, Settings, require_default
from polyfed.privacy.accounting import Neighbours, PrivacyCost, noise_for
from polyfed.privacy.rules import Clipping, RobustRule
from polyfed.privacy.secure_sum import SecureSum
from polyfed.wire.payload import Logits, Representations, TensorBundle, Weights
from polyfed.wire.schema import Declared, StepSchema

EXAMPLES = "num_examples"
"""The only number of a protected reply: the sample count with which the client joined, which is treated as public."""
UPDATE = "weights"
"""The only protected field of weights: an update of the field of that name that the client received."""
_INITIAL = ("polyfed.algorithms.algorithm", "Algorithm.initial")  # of untrained weights, before any data
_CLIPPED, _VOTED = 2.0, math.sqrt(2.0)  # largest distance of two replies, in lengths of one; of two one-hot rows

KIND_KEYS: dict[type[TensorBundle], str] = {Weights: "weights", Representations: "representations", Logits: "logits"}
"""Type of tensors -> its name in settings."""

ClippingNorm = Annotated[float | None, Field(gt=0, allow_inf_nan=False)]


class Budget(Settings):
    """Privacy budget of a client over all its replies."""

    epsilon: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="largest epsilon; a client that has spent it drops out; None: any",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="delta of epsilon; below 1 / a client's samples")


class ReplyProtection(Settings):
    """Clipping and Gaussian noise on each reply, for types of tensors with a clipping norm; others are refused.

    A reply of norm at most L (the norm of the update, or row norm x sqrt(rows)) gets noise of standard deviation
    ``noise_multiplier`` x L in every entry.
    """

    noise_multiplier: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="noise over length; None: the least for budget.epsilon"
    )
    weights: ClippingNorm = Field(default=None, description="largest L2 norm of the update of all weights together")
    representations: ClippingNorm = Field(default=None, description="largest norm of a public sample's representation")
    logits: ClippingNorm = Field(
        default=None, description="largest L2 norm of the logits of a public sample; for votes, the winner's logit"
    )
    votes: bool = Field(
        default=False, description="logits: send only the class that wins after noise on the client's vote"
    )

    @model_validator(mode="after")
    def _votes_on_logits(self) -> Self:
        if self.logits is None:
            require_default(self, "with logits: null", "votes")
        return self

    @property
    def clips(self) -> dict[type[TensorBundle], float]:
        return {bundle: clip for bundle, key in KIND_KEYS.items() if (clip := getattr(self, key)) is not None}

    def sensitivity(self, bundle: type[TensorBundle]) -> float:
        return _VOTED if bundle is Logits and self.votes else _CLIPPED


class SampleProtection(Settings):
    """DP-SGD in clients' own training; replies are made of the trained weights, and get no further noise.

    Batches are drawn by Poisson sampling at the rate batch size / samples, which amplifies privacy.
    """

    noise_multiplier: float = Field(gt=0, allow_inf_nan=False, description="noise on a sum of gradients, over clip")
    clip: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="largest L2 norm of a sample's gradient")


class PrivacySettings(Settings):
    """Differential privacy of the clients' replies in a run."""

    reply: ReplyProtection | None = Field(default=None, description="noise on each reply, for all of a client's data")
    samples: SampleProtection | None = Field(default=None, description="noise in training, for each single sample")
    budget: Budget = Field(default_factory=Budget)
    neighbours: Neighbours = Field(
        default="replace",
        description="samples: data sets between which epsilon is meant: they differ in one sample, or one lacks it; "
        "the number of samples crosses, so only replace holds against a reader of it",
    )
    releases: int | None = Field(
        default=None, ge=1, description="most protected replies of a client; None: one per round"
    )
    metrics: Literal["none", "clear"] = Field(
        default="none",
        description="metrics of clients' test samples: not sent (needs run.evaluate_clients: false), or sent in the "
        "clear, which no epsilon covers",
    )
    secret: Place | None = Field(
        default=None,
        description="file of 32 or more random bytes from which noise is drawn; None: made, and kept in the run folder",
    )

    @model_validator(mode="after")
    def _some_noise(self) -> Self:
        if self.samples is None:
            require_default(self, "with samples: null", "neighbours")
        if (self.reply is None) == (self.samples is None):
            raise ValueError("give one of reply (noise on what is sent) and samples (noise in training)")
        if self.reply is None:
            return self
        if self.reply.noise_multiplier is None and self.budget.epsilon is None:
            raise ValueError("the noise is missing: give reply.noise_multiplier, or budget.epsilon to derive it from")
        if not self.reply.clips:
            raise ValueError("reply covers nothing: give a clipping norm for weights, representations or logits")
        return self

    def resolved(self, steps: Mapping[str, StepSchema], rounds: int) -> PrivacySettings:
        if self.reply is None or self.reply.noise_multiplier is not None:
            return self.model_copy(update={"secret": None})
        assert self.budget.epsilon is not None
        factor = max((_factor(self.reply, schema) for schema in steps.values() if schema.kind == "step"), default=1.0)
        noise = factor * noise_for(self.budget.epsilon, self.budget.delta, self.planned_releases(rounds))
        reply = self.reply.model_copy(update={"noise_multiplier": noise})
        return self.model_copy(update={"secret": None, "reply": reply})

    def planned_releases(self, rounds: int) -> int:
        """Number of replies of a client that share the budget."""
        return self.releases or rounds

    def cost(self, schema: StepSchema) -> PrivacyCost | None:
        """Cost of a noisy reply to a step; None for a reply without tensors."""
        if self.reply is None:
            return None
        factor = _factor(self.reply, schema)
        assert self.reply.noise_multiplier is not None
        return PrivacyCost(self.reply.noise_multiplier / factor) if factor else None


def protected_steps(settings: PrivacySettings, steps: Mapping[str, StepSchema]) -> dict[str, StepSchema]:
    """Steps whose replies are protected, and cost budget."""
    trained = settings.samples is not None
    return {
        name: schema
        for name, schema in steps.items()
        if schema.kind == "step" and (settings.cost(schema) or (trained and schema.returns))
    }


def _factor(reply: ReplyProtection, schema: StepSchema) -> float:
    """Sensitivity of all fields of a reply together, in lengths of each, for the types that the method sends."""
    options = [tensor_kinds(declared) for declared in schema.returns.values()]
    return math.sqrt(sum(max(map(reply.sensitivity, kinds)) ** 2 for kinds in options if kinds))


def tensor_kinds(declared: Declared) -> list[type[TensorBundle]]:
    options = typing.get_args(declared) if isinstance(declared, UnionType) else (declared,)
    return [option for option in options if isinstance(option, type) and issubclass(option, TensorBundle)]


def uncovered(settings: PrivacySettings, step: str, schema: StepSchema) -> Iterator[str]:
    """Descriptions of the fields of a step's replies that are not protected and may depend on private data."""
    if schema.kind == "fresh":
        if (schema.function.__module__, schema.function.__qualname__) != _INITIAL:
            yield f"the replies of untrained clients to '{step}'"
    elif schema.kind == "query":
        if settings.metrics != "clear":
            yield f"the metrics of '{step}', which are of clients' test samples"
    else:
        if schema.others is not None:
            yield f"numbers in the reply to '{step}', such as losses"
        for name, declared in schema.returns.items():
            if obstacle := _obstacle(settings.reply, name, declared, schema):
                yield f"'{name}' in the reply to '{step}' ({obstacle})"


def _obstacle(reply: ReplyProtection | None, name: str, declared: Declared, schema: StepSchema) -> str:
    if not (kinds := tensor_kinds(declared)):
        return "" if name == EXAMPLES and declared is int else "a number of the client's own"
    if reply is None:  # made of weights that were trained with noise
        return ""
    if Weights in kinds and not (name == UPDATE and schema.receives.get(name) is Weights):
        return "weights that are not an update of weights that were sent to the client"
    missing = set(kinds) - set(reply.clips)
    keys = sorted(f"privacy.reply.{KIND_KEYS[one]}" if one in KIND_KEYS else one.label for one in missing)
    return f"no clipping norm: {' and '.join(keys)}" if keys else ""


def require_covered(settings: PrivacySettings, steps: Mapping[str, StepSchema], method: str) -> None:
    """Check that all replies of a method's steps are protected, apart from queries, which can be left out.

    Raises:
        ConfigError: a field is not protected; the message names it.
    """
    missing = [text for step, one in steps.items() if one.kind != "query" for text in uncovered(settings, step, one)]
    if missing:
        what = f"privacy does not cover all that clients of '{method}' send: {'; '.join(missing)}"
        raise ConfigError(f"{what}; add the missing settings, choose another method, or leave privacy out")


class AggregationSettings(Settings):
    """Combination of the replies before the method uses them."""

    clip: Clipping | None = Field(
        default=None, description="largest update of a client; None: replies count as they are"
    )
    robust: SerializeAsAny[RobustRule] | None = Field(
        default=None,
        description="rule against a minority of false clients: median, trimmed_mean, geometric_median, krum, "
        "multi_krum; None: replies count as they are",
    )
    secure: SerializeAsAny[SecureSum] | None = Field(
        default=None,
        description="sums of which the server sees only the result: pairwise_masks, or unmasked to compare with; "
        "None: it sees every reply",
    )
