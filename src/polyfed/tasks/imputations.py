"""Ways to fill in for modalities that samples lack."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.models.model import Embedder
from polyfed.tasks import evaluating
from polyfed.tasks.imputation import Embeddings, Imputation, Imputer, PresentEmbeddings

_LEAST = 1e-3  # mass of a running mean below which it is none


class LeaveOut(Imputation):
    """Nothing: the mean is over the modalities that a sample has."""

    short_name: ClassVar[str] = "drop"

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _LeftOut(modalities, self.dropout)


class _LeftOut(Imputer):
    def share(self, parts: Embeddings, count: int) -> Float[Tensor, "b 1"]:
        times = torch.bincount(torch.cat([part.places for part in parts.values()]), minlength=count)
        return times[:, None].to(next(iter(parts.values())).values.dtype)


class Zero(Imputation):
    """Zeros, so that a sample with fewer modalities says less."""

    short_name: ClassVar[str] = "zero"

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return Imputer(modalities, self.dropout)


class Placeholder(Imputation):
    """A vector that is learnt, one a modality."""

    short_name: ClassVar[str] = "placeholder"

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _Placeholders(dim, modalities, self.dropout)


class _Placeholders(Imputer):
    def __init__(self, dim: int, modalities: Sequence[str], dropout: float) -> None:
        super().__init__(modalities, dropout)
        self.vectors = nn.ParameterDict({name: nn.Parameter(torch.zeros(dim)) for name in modalities})

    def fill(self, modality: str, places: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        vector: Tensor = self.vectors[modality]
        return vector.expand(len(places), -1)


class ClassPrototypes(Imputation):
    """The mean embeddings of the classes in the lacking modality, by how near the sample is to them in others.

    sum_c softmax_c(cos(z_a, m_a,c) / tau) m_b,c for what a sample has, a, and lacks, b; the mean over all that it has.
    Means are running ones of training samples, and are averaged among clients as other weights are.
    """

    short_name: ClassVar[str] = "prototypes"
    is_per_sample: ClassVar[bool] = False

    temperature: float = Field(default=0.1, gt=0, description="tau, of the cosines")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of the running means, a batch")

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _PrototypeMix(self, dim, modalities, classes)


class _PrototypeMix(Imputer):
    running_sums: Tensor
    running_mass: Tensor

    def __init__(self, settings: ClassPrototypes, dim: int, modalities: Sequence[str], classes: int) -> None:
        super().__init__(modalities, settings.dropout)
        self.settings = settings
        # a running mean is sums / mass: as both are bounded and average among clients, so does it
        self.register_buffer("running_sums", torch.zeros(len(modalities), classes, dim))
        self.register_buffer("running_mass", torch.zeros(len(modalities), classes))

    @torch.no_grad()
    def observe(self, parts: Embeddings, labels: Int64[Tensor, " b"]) -> None:
        for name, part in parts.items():
            row, classes = self.modalities.index(name), labels[part.places]
            shown = torch.zeros_like(self.running_mass[row]).index_add(
                0, classes, torch.ones_like(classes, dtype=torch.float32)
            )
            added = torch.zeros_like(self.running_sums[row]).index_add(0, classes, part.values.detach().float())
            keep = torch.where(shown > 0, self.settings.momentum, 1.0)  # a class that is not there stays as it is
            self.running_mass[row] = keep * self.running_mass[row] + (1 - keep)
            mean = added / shown.clamp(min=1)[:, None]
            self.running_sums[row] = keep[:, None] * self.running_sums[row] + (1 - keep)[:, None] * mean

    def fill(self, modality: str, places: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        goal, mixed = self.modalities.index(modality), {}
        for name, part in parts.items():
            row = self.modalities.index(name)
            # noise and rules may leave a trace of a class that nobody has
            known = ((self.running_mass[row] > _LEAST) & (self.running_mass[goal] > _LEAST)).nonzero()[:, 0]
            if name == modality or not len(known):
                continue
            means = self.running_sums[:, known] / self.running_mass[:, known, None]
            near = F.normalize(part.values.float(), dim=-1) @ F.normalize(means[row], dim=-1).T
            mixed[name] = PresentEmbeddings((near / self.settings.temperature).softmax(-1) @ means[goal], part.places)
        return _mean(mixed, parts, count)[places]


class Neighbour(Imputation):
    """The embedding that the nearest public sample has in the lacking modality, by those that the sample has."""

    short_name: ClassVar[str] = "nearest"
    looks_in_public: ClassVar[bool] = True

    def require_public(self, modalities: Collection[str]) -> None:
        """See ``Imputation``."""
        if len(modalities) < 2:
            raise ConfigError(
                "task.imputation nearest takes a public set of several modalities; add a 'public' section of such a "
                "source, or choose another imputation"
            )

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _Nearest(modalities, self.dropout)


class _Nearest(Imputer):
    def __init__(self, modalities: Sequence[str], dropout: float) -> None:
        super().__init__(modalities, dropout)
        self._bank: dict[str, Tensor] = {}  # of the model as it was when the client's step began; no state

    def prepare(self, model: Embedder, public: Samples | None, batch_size: int) -> None:
        if public is None or not set(self.modalities) <= set(public.modalities):
            raise ConfigError(
                f"task.imputation nearest takes a public set with {list(self.modalities)}; add a 'public' section of "
                "such a source, or choose another imputation"
            )
        with evaluating(model, inference=False):
            batches = [batch.to(model.device) for batch in public.only(self.modalities).batches(batch_size)]
            self._bank = {
                name: torch.cat([model.embed(name, batch.inputs[name]).float() for batch in batches])
                for name in self.modalities
            }

    def fill(self, modality: str, places: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        if not self._bank:
            raise ConfigError(
                "task.imputation nearest looks in the public set as the client's own model sees it, which neither a "
                "saved model nor a method that trains a fused one (fedafd) has; choose another imputation"
            )
        near = {
            name: PresentEmbeddings(
                F.normalize(part.values.detach().float(), dim=-1) @ F.normalize(self._bank[name], dim=-1).T, part.places
            )
            for name, part in parts.items()
        }
        return self._bank[modality][_mean(near, near, count)[places].argmax(1)]


class Generator(Imputation):
    """What a small network makes of the modalities that the sample has, learnt from samples that have both.

    G_ab(z_a), the mean over all a that it has, with weight times the mean over samples of ||G_ab(z_a) - z_b||^2 / d as
    its loss; z_b is what it is to learn, not what learns.
    """

    short_name: ClassVar[str] = "generator"

    hidden: int = Field(default=128, ge=1, description="width of the one hidden layer")
    weight: float = Field(default=1.0, gt=0, description="factor of the loss of reconstruction")

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _Generators(self, dim, modalities)


class _Generators(Imputer):
    def __init__(self, settings: Generator, dim: int, modalities: Sequence[str]) -> None:
        super().__init__(modalities, settings.dropout)
        self.weight = settings.weight
        self.networks = nn.ModuleDict(
            {
                f"{one}_to_{other}": nn.Sequential(
                    nn.Linear(dim, settings.hidden), nn.GELU(), nn.Linear(settings.hidden, dim)
                )
                for one in modalities
                for other in modalities
                if one != other
            }
        )

    def fill(self, modality: str, places: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        made = {
            name: PresentEmbeddings(self.networks[f"{name}_to_{modality}"](part.values), part.places)
            for name, part in parts.items()
            if name != modality
        }
        return _mean(made, parts, count)[places]

    def loss(self, parts: Embeddings, count: int) -> Tensor | None:
        losses = []
        for one, other in ((a, b) for a in parts for b in parts if a != b):
            z, goal = _of_both(parts[one], parts[other], count)
            made = self.networks[f"{one}_to_{other}"](z.detach())
            losses.append((made.float() - goal.detach().float()).square().mean(1).sum() / count)
        return self.weight * torch.stack(losses).sum() if losses else None


def _of_both(one: PresentEmbeddings, other: PresentEmbeddings, count: int) -> tuple[Tensor, Tensor]:
    """Embeddings of the samples that have both modalities."""
    if len(one.places) == len(other.places) == count:
        return one.values, other.values
    return one.values[torch.isin(one.places, other.places)], other.values[torch.isin(other.places, one.places)]


def _mean(made: Embeddings, parts: Embeddings, count: int) -> Float[Tensor, "b w"]:
    """Means of what was made for each of ``count`` samples, of the modalities that it has; zero where nothing was."""
    like = next(iter((*made.values(), *parts.values()))).values
    total, times = like.new_zeros(count, like.shape[1]), like.new_zeros(count, 1)
    for part in made.values():
        total = total.index_add(0, part.places, part.values.to(total.dtype))
        times = times.index_add(0, part.places, torch.ones_like(part.values[:, :1]).to(times.dtype))
    return total / times.clamp(min=1)
