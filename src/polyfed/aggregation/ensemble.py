"""Per-sample weighted ensemble of client representations, folded one client at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int, Int64
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.statistics import working_dtype
from polyfed.core.errors import PayloadError
from polyfed.core.settings import Settings
from polyfed.losses.distillation import relational_kl

_RECORDED = 1024  # samples whose weights are kept for inspection, unless told which


class Rows(NamedTuple):
    """One client's rows, kept next to the mean that they are part of."""

    values: Float[Tensor, "P d"]
    log_weights: Float[Tensor, " P"]


class Ensembled(NamedTuple):
    """Result of an ensemble."""

    values: Float[Tensor, "P d"]
    """Weighted mean of the clients' vectors, not re-normalised; zero where none contributed."""
    valid: Bool[Tensor, " P"]
    """Samples to which at least one client contributed."""
    rows: Mapping[str, Rows] = MappingProxyType({})
    """Client -> what it contributed, where a loss needs more than the mean."""


class Ensemble:
    """Online softmax over clients: r_k = sum_c softmax_c(l_ck) r_ck, in memory O(P d) however many clients
    come.

    The log weight l distinguishes methods: a constant for the mean, log n_c for weighting by private
    samples (reamFL+Avg), log(a_c n_c) for FedIoT, the contrastive score for GCA (CreamFL Eqs. 5-6) and SED.

    >>> ensemble = Ensemble(1, 2)
    >>> ensemble.add(torch.tensor([[1.0, 0.0]]), math.log(3))
    >>> ensemble.add(torch.tensor([[0.0, 1.0]]), math.log(1))
    >>> ensemble.result().values
    tensor([[0.7500, 0.2500]])
    """

    def __init__(
        self,
        samples: int,
        dim: int,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype = torch.float32,
        record: Int[Tensor, " k"] | None = None,
    ) -> None:
        """Start an empty ensemble.

        Args:
            samples: P, size of the public set.
            dim: d, width of the representations.
            device: device of the running sums.
            dtype: type of the running sums.
            record: samples whose log weights are kept, for ``weights``; None: up to 1024, evenly spaced.
        """
        self.total = torch.zeros(samples, dim, device=device, dtype=dtype)
        self._denominator = torch.zeros(samples, device=device, dtype=dtype)
        self._peak = torch.full((samples,), -math.inf, device=device, dtype=dtype)
        spaced = torch.arange(0, samples, -(-samples // _RECORDED) or 1)
        self.recorded = (spaced if record is None else record).to(device)
        self._history: list[Tensor] = []

    def add(
        self,
        values: Float[Tensor, "P d"],
        log_weights: Float[Tensor, " P"] | float,
        valid: Bool[Tensor, " P"] | None = None,
    ) -> None:
        """Fold the next client in.

        Args:
            values: its representations.
            log_weights: log of its weight, for each sample or one for all; -inf: it does not count.
            valid: samples that it sent; the others do not count, whatever stands in their rows.

        Raises:
            PayloadError: a wrong shape, or a log weight that is NaN or +inf.
        """
        logs = self._checked(values, log_weights)
        if valid is not None:
            logs = logs.masked_fill(~valid.to(logs.device), -math.inf)
        self._history.append(logs[self.recorded])  # all samples of all clients would outgrow the ensemble itself
        peak = torch.maximum(self._peak, logs)
        level = peak.masked_fill(peak == -math.inf, 0)  # -inf less -inf is NaN; no client counts there so far
        weight, shrink = (logs - level).exp_(), (self._peak - level).exp_()
        self._denominator.mul_(shrink).add_(weight)
        values, absent = values.to(self.total), logs == -math.inf
        if bool(absent.any()):  # a row that does not count may hold anything, NaN too, and 0 x NaN is NaN
            values = values.masked_fill(absent[:, None], 0)
        self.total.mul_(shrink[:, None]).addcmul_(values, weight[:, None])
        self._peak = peak

    def result(self) -> Ensembled:
        valid = self._denominator > 0
        return Ensembled(self.total / self._denominator.masked_fill(~valid, 1)[:, None], valid)

    def weights(self) -> Float[Tensor, "clients k"]:
        """Weights of the clients, in the order added, on the samples ``recorded``: columns of sum 1, or 0.

        Raises:
            PayloadError: no client was added.
        """
        if not self._history:
            raise PayloadError("no client was added to the ensemble, so it has no weights")
        return torch.stack(self._history).softmax(0).nan_to_num_(0.0)

    def _checked(self, values: Tensor, log_weights: Tensor | float) -> Float[Tensor, " P"]:
        if values.shape != self.total.shape:
            raise PayloadError(
                f"representations have shape {tuple(values.shape)}, not {tuple(self.total.shape)}; "
                "send one row a public sample, in the public set's order, of the agreed width"
            )
        logs = torch.as_tensor(log_weights, device=self.total.device, dtype=self.total.dtype)
        if logs.ndim and logs.shape != self._denominator.shape:
            raise PayloadError(
                f"log weights have shape {tuple(logs.shape)}, not {tuple(self._denominator.shape)}; give one a sample"
            )
        if not bool((logs < math.inf).all()):
            raise PayloadError("log weights hold NaN or +inf; check that the client's representations are finite")
        return logs.expand_as(self._denominator)


# ---- what clients see alike: each compares its rows with its own, so that no common space is needed


class Relations(NamedTuple):
    """Similarities between samples s and t of a batch, row s and column t."""

    cosines: Float[Tensor, "b b"]
    """Weighted mean over clients; 0 where no client compares."""
    known: Bool[Tensor, "b b"]
    """Pairs that some client compares."""


def relations(source: Mapping[str, Rows], target: Mapping[str, Rows], index: Int64[Tensor, " b"]) -> Relations:
    """sum_i w_i(s, t) cos(u_i(s), v_i(t)) over the clients i with both outputs, w softmax of (l_i(s) + l_i(t)) / 2.

    Args:
        source: client -> its rows u_i and log weights l_i of one output on all samples.
        target: the same of another output, or of the same.
        index: the samples to compare. Memory: clients x b x b.

    >>> rows = {"a": Rows(torch.eye(2), torch.zeros(2)), "b": Rows(torch.ones(2, 2), torch.zeros(2))}
    >>> relations(rows, rows, torch.arange(2)).cosines.round(decimals=2).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    cosines = [torch.zeros(len(index), len(index), device=index.device)]
    logs = [torch.full_like(cosines[0], -torch.inf)]  # without clients: a batch that none compares has relations, too
    for client in [name for name in source if name in target]:  # in a fixed order, for equal bits
        (u, own), (v, others) = (side[client] for side in (source, target))
        u, v = (F.normalize(rows[index].float(), dim=1) for rows in (u, v))
        cosines.append(u @ v.T)
        logs.append((own[index, None] + others[index]) / 2)
    weights = torch.stack(logs).softmax(0).nan_to_num(0.0)
    return Relations((weights * torch.stack(cosines)).sum(0), (weights > 0).any(0))


def relational_losses(
    outputs: Mapping[str, Float[Tensor, "b d"]],
    targets: Mapping[str, Ensembled],
    index: Int64[Tensor, " b"],
    items: Int64[Tensor, " b"],
    tau: float,
) -> dict[str, Tensor]:
    """Maps outputs to the mean of ``relational_kl`` over those that they are compared with, themselves included.

    Args:
        outputs: the student's.
        targets: targets with clients' rows.
        index: the samples of the batch among those of the targets.
        items: of these samples. Within an output samples of one item are not compared: an image and its copy under
            another caption have cosine 1 for everybody, which would drown what is to be learnt.
        tau: temperature.
    """
    strangers = items[:, None] != items
    losses = {}
    for name, ensembled in targets.items():
        parts = []
        for other, compared in targets.items():
            cosines, known = relations(ensembled.rows, compared.rows, index)
            known = known & strangers if other == name else known
            parts.append(relational_kl(outputs[name], outputs[other], cosines, known, tau))
        losses[name] = torch.stack(parts).mean()
    return losses


# ---- maps of one participant's representations into the space of another's, fitted on samples that both represent
#
# Networks that were trained apart agree on what is alike, not on axes: unit vectors of unaligned spaces average to
# almost nothing. Rows that are zero on either side, as of samples that a client did not represent, do not take part
# in a fit.

_RIDGE_PENALTY = 0.01


@torch.no_grad()
def procrustes(values: Float[Tensor, "n d"], reference: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """values R with the rotation or reflection R that minimises ||values R - reference||_F (Schoenemann 1966).

    R = U V^T of the singular value decomposition of values^T reference. Norms of rows and angles between them stay.
    With fewer samples than dimensions R is not unique, but it is the same at every call.

    Returns:
        In fp32, or in fp64 if a side is.

    >>> reference = torch.eye(2)
    >>> rotated = reference @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    >>> procrustes(rotated, reference).round(decimals=3).abs().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    values, reference = _in_working_dtype(values, reference)
    # a row that is zero on either side adds nothing to the product
    left, _, right = torch.linalg.svd(values.T @ reference)
    rotated: Tensor = values @ (left @ right)
    return rotated


@torch.no_grad()
def ridge(values: Float[Tensor, "n d"], reference: Float[Tensor, "n d"], penalty: float) -> Float[Tensor, "n d"]:
    """values W at unit length, W = argmin sum_k ||v_k W - r_k||^2 + penalty n ||W||_F^2; zero rows stay zero.

    n counts the samples that take part. With n close to d and without a penalty the map would return the reference
    itself, whatever the values are. The larger the penalty, the closer W gets to a multiple of values^T reference, in
    which directions weigh by how strongly both sides use them.

    Args:
        values: unit rows, or zero ones.
        reference: likewise.
        penalty: greater than 0. The mean eigenvalue of values^T values / n is 1 / d for comparison.

    Returns:
        In fp32, or in fp64 if a side is.

    >>> rows = torch.eye(2)
    >>> ridge(rows, rows.flip(1), penalty=0.01).round(decimals=3).abs().tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    values, reference = _in_working_dtype(values, reference)
    fitted = values * reference.any(1, keepdim=True)
    present = fitted.any(1).sum().clamp_min(1).to(fitted)  # of the same precision, and never on the host
    gram = fitted.T @ fitted
    gram.diagonal().add_(penalty * present)
    return F.normalize(values @ torch.linalg.solve(gram, fitted.T @ reference), dim=1)


class Alignment(Settings):
    """A map of each client's representations to the server's, before they are averaged.

    >>> rows = torch.eye(2)
    >>> Alignment(kind="procrustes").move(rows.flip(1), rows).round(decimals=3).abs().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    kind: Literal["procrustes", "ridge"] = Field(description="rotation or reflection, or ridge regression")
    penalty: float | None = Field(default=None, ge=1e-6, description="ridge: penalty of the map; None: 0.01")

    @model_validator(mode="after")
    def _penalty_of_ridge(self) -> Self:
        if self.penalty is not None and self.kind != "ridge":
            raise ValueError(f"penalty {self.penalty} is of ridge, but kind is {self.kind}; leave it out")
        return self

    def move(self, values: Float[Tensor, "n d"], reference: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """``values`` in the space of ``reference``."""
        if self.kind == "procrustes":
            return procrustes(values, reference)
        return ridge(values, reference, _RIDGE_PENALTY if self.penalty is None else self.penalty)


def _in_working_dtype(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    dtype = working_dtype(values, reference)
    return values.to(dtype), reference.to(values.device, dtype)
