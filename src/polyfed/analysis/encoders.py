"""What analyses look at: encoders of any kind, with the data that they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.data.view import DataContext, View
from polyfed.federation.settings import DataSettings
from polyfed.runs.opened import ServerModel


@dataclass(frozen=True)
class Encoders:
    """Encoders by modality, and the data sets that they may be shown.

    Attributes:
        name: what they are, for titles and records.
        data: the sources.
        views: modality -> view of its encoder.
        context: where the views find what they learnt.
        embed: (modality, encoder input on the device) -> embeddings [b, d].
        device: of the encoders.
        batch: samples at a time.
    """

    name: str
    data: DataSettings
    views: Mapping[str, View]
    context: DataContext
    embed: Callable[[str, Tensor], Tensor]
    device: torch.device
    batch: int = 256

    def split(self, source: str, name: str) -> Split:
        """A split of a source.

        Raises:
            ConfigError: there is no such source.
            DataError: the source has no such split.
        """
        if source not in self.data.sources:
            raise ConfigError(f"no source '{source}' in data.sources; {nearest(source, self.data.sources)}")
        return self.data.sources[source].open(name, name=source, data_dir=self.data.data_folder)

    def modalities(self, split: Split) -> tuple[str, ...]:
        """Those of a split that there are encoders for."""
        return tuple(name for name in self.views if name in split.columns)

    def samples(self, split: Split, modality: str) -> Samples:
        """All samples of a split, in one modality."""
        return assemble(split, {modality: self.views[modality]}, self.context)

    @torch.no_grad()
    def embeddings(
        self, samples: Samples, modality: str, rows: Int64[Tensor, " n"] | None = None
    ) -> Iterator[Float[Tensor, "b d"]]:
        """Embeddings of rows of a modality (by default every row once), on the CPU, batch by batch."""
        load = samples.inputs[modality]
        rows = torch.arange(len(load)) if rows is None else rows
        for part in torch.split(rows, self.batch):
            yield self.embed(modality, load(part).to(self.device)).float().cpu()


def encoders_of(server: ServerModel, *, normalise: bool) -> Encoders:
    """A server model's encoders; with ``normalise`` they give representations (unit norm), else embeddings."""
    run, model = server.run, server.model
    return Encoders(
        name=f"{run.name}, server model of round {server.round}",
        data=run.conditions.data,
        views=server.views,
        context=server.context,
        embed=model.represent if normalise else model.embed,
        device=model.device,
        batch=run.conditions.run.evaluation_batch,
    )


def drawn(count: int, most: int | None, *purpose: int | str) -> Int64[Tensor, " k"]:
    """At most ``most`` of ``count`` positions, ascending, drawn at random by ``purpose`` alone."""
    if most is None or most >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=generator(*purpose))[:most].sort().values


def require_different(names: Sequence[str], option: str) -> None:
    """Raise ConfigError if a name comes twice."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{option}: '{twice[0]}' is named {names.count(twice[0])} times; name it once")
