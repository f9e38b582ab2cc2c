"""What is put to the test: a model whose encoders stay as they are, and whose clients' data it may be shown."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from polyfed.core.errors import DataError
from polyfed.data.samples import Samples
from polyfed.data.source import Source
from polyfed.data.view import DataContext, View
from polyfed.models.model import Model
from polyfed.models.towers import LocalFeatures, Splittable

ClientTests = Callable[[], Mapping[str, Samples]]


@dataclass(frozen=True)
class Subject:
    """A frozen model.

    Attributes:
        name: for titles and records.
        model: in evaluation mode, on its device, without gradients.
        views: modality -> view of its encoder.
        context: where the views find what they learnt.
        batch: samples at a time where there is no gradient.
        clients: gives the test samples of every client in these views, by id; None if there are no clients.
        known: sources of data that it was trained on, as far as is known.
    """

    name: str
    model: Model
    views: Mapping[str, View]
    context: DataContext
    batch: int = 256
    clients: ClientTests | None = None
    known: tuple[Source, ...] = ()
    _trunks: dict[str, nn.Module | None] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.model.requires_grad_(False).eval()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def lacks(self, modalities: Sequence[str]) -> str | None:
        """Why it cannot be shown these modalities; None if it can."""
        missing = [name for name in modalities if name not in self.views]
        return f"{self.name} encodes {', '.join(self.views)}, not '{missing[0]}'" if missing else None

    def knows(self, source: Source, data_dir: Path | None) -> bool:
        """Whether it was trained on the same data, in whichever columns or selection.

        Args:
            source: what is asked about.
            data_dir: folder that relative paths start from.
        """
        return source.identity(data_dir) in (known.identity(data_dir) for known in self.known)

    def trunk(self, modality: str) -> nn.Module | None:
        """The encoder before its projection or align module, input -> ``LocalFeatures``; None if it cannot be split."""
        if modality not in self._trunks:
            encoder = self.model.encoders[modality]
            # of a copy, as a split uses its encoder up
            trunk = copy.deepcopy(encoder).split()[0].eval() if isinstance(encoder, Splittable) else None
            self._trunks[modality] = trunk
        return self._trunks[modality]

    def embed(self, modality: str) -> Callable[[Tensor], Tensor]:
        """Encoder input -> embedding [b, d]."""
        return lambda x: self.model.embed(modality, x)

    def pooled(self, modality: str) -> Callable[[Tensor], Tensor] | None:
        """Encoder input -> pooled vector [b, c] of the trunk; None if the encoder cannot be split."""
        trunk = self.trunk(modality)
        return None if trunk is None else lambda x: _local(trunk, x).pooled


def _local(trunk: nn.Module, x: Tensor) -> LocalFeatures:
    found: LocalFeatures = trunk(x)
    return found


@torch.no_grad()
def computed(
    function: Callable[[Tensor], Tensor], samples: Samples, modality: str, subject: Subject, what: str
) -> Tensor:
    """``function`` of every distinct input of a modality, repeated as the samples repeat it; fp32, on the CPU.

    Raises:
        DataError: a value is not finite, or there are no samples.
    """
    if not len(samples):
        raise DataError(f"{what} has no samples")
    rows, place = samples.rows[modality].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    load = samples.inputs[modality]
    parts = [function(load(part).to(subject.device)).float().cpu() for part in torch.split(rows, subject.batch)]
    found = torch.cat(parts)
    if not bool(found.isfinite().all()):
        raise DataError(f"features of '{modality}' by {subject.name} on {what} hold NaN or infinity: it has diverged")
    return found[place]
