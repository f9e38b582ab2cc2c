"""Instruments: whether an ensemble of clients is a teacher that the server can learn from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.algorithm import Server
from polyfed.data.samples import Samples
from polyfed.federation.public_outputs import GALLERY, of_part


def mean_norms(targets: Mapping[str, Ensembled]) -> dict[str, float]:
    """``mean_norm.<output>``: mean norm of the clients' weighted mean before any scaling.

    Means of unit vectors have norm 1 where all clients agree, and fall to 1 / sqrt(clients) where nothing is common to
    their spaces.
    """
    return {
        f"mean_norm.{name}": float(torch.linalg.vector_norm(target.values[target.valid], dim=1).mean())
        for name, target in targets.items()
        if name in of_part(targets) and bool(target.valid.any())
    }


class Judge:
    """The server's task as a judge of representations on one gallery.

    The gallery is that of ``public.gallery``, from which nobody learns; without one it is ``index`` among the public
    pairs, on which the server ranks better than on others, as it has trained on them."""

    def __init__(self, server: Server, own: Mapping[str, Tensor], samples: Samples, index: Tensor) -> None:
        gallery = of_part(server.parts, GALLERY)
        self._part, self._held_out = (GALLERY if gallery else ""), len(next(iter(gallery.values()), ()))
        self._task, self._index = server.task, None if gallery else index.to(server.device)
        self._samples = next(iter(gallery.values())) if gallery else samples.subset(index)
        self._own = self._rows(own)

    def metrics(self, targets: Mapping[str, Ensembled]) -> dict[str, float]:
        """The primary metric m of teacher and server; nothing if the task cannot judge, or samples have no target.

        ``teacher.m`` of the targets; ``teacher.m.<modality>`` of those of one modality beside the server's own of the
        others; ``student.m`` of the server's own; ``teacher.gallery``: how many samples nobody learns from, 0 if they
        are public pairs.
        """
        values = self._rows(_covered(targets))
        metric = self._task.primary
        judged: dict[str, Mapping[str, Tensor]] = {
            f"teacher.{metric}.{modality}": self._own | {modality: own} for modality, own in values.items()
        }
        if values.keys() == self._own.keys():
            judged[f"teacher.{metric}"] = values
        if values:
            judged[f"student.{metric}"] = self._own
        found = {name: self._task.judge(representations, self._samples) for name, representations in judged.items()}
        known = {name: value for name, value in found.items() if value is not None}
        return known | {"teacher.gallery": float(self._held_out)} if known else {}

    def _rows(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        chosen = of_part(outputs, self._part)
        return chosen if self._index is None else {name: rows[self._index] for name, rows in chosen.items()}


def _covered(targets: Mapping[str, Ensembled]) -> dict[str, Tensor]:
    return {name: target.values for name, target in targets.items() if bool(target.valid.all())}
