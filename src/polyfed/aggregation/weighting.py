"""One interface for all ways to weigh clients' public-set uploads against each other, sample by sample."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.distinct import Distinct
from polyfed.aggregation.statistics import Statistic, Statistics, row_statistics, working_dtype
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings


@dataclass(frozen=True)
class Evidence:
    """One client's representations of the public samples in one modality, next to the server's own."""

    values: Float[Tensor, "n w"]
    """Representations of all public samples, in order."""
    output: str
    """The modality."""
    server_outputs: Mapping[str, Float[Tensor, "n d"]]
    """The server's representations of the same samples by modality."""
    examples: int
    """The client's private samples."""
    modalities: int
    """Number of modalities that the client encodes."""
    items: Int64[Tensor, " n"] | None = None
    """Ascending number of the item behind each sample."""
    inverse_index: Mapping[str, Int64[Tensor, " _"]] = field(default_factory=dict)
    """Modality -> index of each sample's row among the distinct ones, where some repeat."""

    def statistics(self, wanted: Collection[Statistic], *, tau: float = 1.0, mask_siblings: bool = False) -> Statistics:
        """Statistics of the cosines to the server's representations of this modality.

        Args:
            wanted: names of the statistics.
            tau: temperature by which cosines are divided.
            mask_siblings: True if samples of one item are not rivals of each other.

        Raises:
            ConfigError: the server has no representations of this modality.
        """
        return self.compared(self.output, wanted, tau=tau, mask_siblings=mask_siblings, cosines=True)

    def compared(
        self,
        modality: str,
        wanted: Collection[Statistic],
        *,
        tau: float,
        mask_siblings: bool = False,
        cosines: bool = False,
    ) -> Statistics:
        """Statistics of the products with the server's representations of a modality; arguments as ``statistics``.

        Each distinct row is compared with each distinct one; ``winner`` is one of these.

        Raises:
            ConfigError: the server has no representations of this modality.
        """
        if modality not in self.server_outputs:
            raise ConfigError(
                f"the server has no representations of '{modality}' to compare with; it has "
                f"{sorted(self.server_outputs)}"
            )
        own = Distinct.of(self.values, self.inverse_index.get(self.output))
        anchors = Distinct.of(
            self.server_outputs[modality], self.inverse_index.get(modality), self.siblings(mask_siblings)
        )
        # rows come in 16 bits where the wire is, and cosines of these must not
        dtype = working_dtype(own.rows, anchors.rows)
        rows, others = (F.normalize(side.rows.to(dtype), dim=1) if cosines else side.rows for side in (own, anchors))
        return row_statistics(
            rows,
            others,
            wanted,
            of=own.inverse_index,
            own=anchors.inverse_index,
            tau=tau,
            items=anchors.items,
            counts=anchors.counts,
        )

    def siblings(self, masked: bool) -> Int64[Tensor, " n"] | None:
        """Item numbers if samples of one item are to be no rivals, else None.

        Raises:
            ConfigError: they are to be none, and the items are not known.
        """
        # a study may weigh without items; a run always knows them
        if masked and self.items is None:
            raise ConfigError("mask_siblings needs the items of the public samples; they are unknown here")
        return self.items if masked else None

    def truth(self) -> Int64[Tensor, " n"]:
        """Row that a right client ranks first: the sample's own representation."""
        return Distinct.of(self.values, self.inverse_index.get(self.output)).inverse_index


class Weighting(Settings):
    """A weight of each client on each public sample, before they are made to sum to 1 by ``Ensemble``."""

    home: ClassVar[str] = "polyfed.aggregation.weighting"
    needs_partner: ClassVar[bool] = False
    """True if representations of a modality can only be weighed with those of another one."""

    @abstractmethod
    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"] | float:
        """Unnormalised log weight of the client, for each sample or one for all; -inf: it does not count.

        Raises:
            ConfigError: the evidence lacks what the weights come from (``needs_partner``, items).
        """


def log_share(statistics: Statistics) -> Float[Tensor, " n"]:
    """x_kk - log sum_j exp x_kj over the own anchor and its rivals, from ``positive`` and ``negatives_lse``.

    >>> statistics = {"positive": torch.tensor([0.0]), "negatives_lse": torch.tensor([0.0])}
    >>> log_share(statistics).exp().tolist()
    [0.5]
    """
    return statistics["positive"] - torch.logaddexp(statistics["positive"], statistics["negatives_lse"])


def log_count(examples: float) -> float:
    """log n; -inf, so that the client does not count, if it has no sample.

    >>> round(log_count(100), 2), log_count(0)
    (4.61, -inf)
    """
    return math.log(examples) if examples > 0 else -math.inf


# ---- by who a client is: its samples, and its modalities


class Mean(Weighting):
    """Every client counts alike: FedMD's consensus (Li & Wang 2019), and CreamFL's ablation without weights."""

    short_name: ClassVar[str] = "mean"

    def log_weights(self, evidence: Evidence) -> float:
        """0."""
        return 0.0


class Count(Weighting):
    """n_c, the private samples of a client, as FedAvg weighs models (McMahan et al. 2017): reamFL+Avg."""

    short_name: ClassVar[str] = "count"

    def log_weights(self, evidence: Evidence) -> float:
        return log_count(evidence.examples)


class IoT(Weighting):
    """a_c n_c, a_c being ``factor`` for clients of several modalities and 1 for others (Zhao et al., IoTDI 2022).

    FedIoT's weights of models, applied to clients' outputs on public samples: reamFL+IoT of the CreamFL paper.
    """

    short_name: ClassVar[str] = "iot"

    factor: float = Field(default=100.0, gt=0, description="FedIoT's alpha, for clients of several modalities")

    def log_weights(self, evidence: Evidence) -> float:
        return log_count(evidence.examples * (self.factor if evidence.modalities > 1 else 1.0))


class PairedOnly(Weighting):
    """Only clients that encode more than one modality count, all alike (FedAFD, CVPR 2026, supplement, Table 9:
    Aggr-MM)."""

    short_name: ClassVar[str] = "paired_only"

    def log_weights(self, evidence: Evidence) -> float:
        """0, or -inf for a client of one modality."""
        return 0.0 if evidence.modalities > 1 else -math.inf


# ---- sample by sample, by how sure or right a client is


class GCA(Weighting):
    """Global-local contrastive aggregation (CreamFL, Yu et al. 2023, Eq. 4; ``Ensemble`` takes the softmax of Eq. 5).

    A client's representation of a sample counts by how well it picks the server's representation of the same sample
    in the other modality out of the public set; with several others, by the mean of the scores.
    """

    short_name: ClassVar[str] = "gca"

    needs_partner: ClassVar[bool] = True

    tau: float = Field(default=1.0, gt=0, description="temperature of Eq. 4; below about 0.1 it selects")
    include_self: bool = Field(default=False, description="keep j = k in the sum of Eq. 4, as released")
    mask_siblings: bool = Field(default=False, description="leave captions of the same image out of Eq. 4's sum")

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """Mean over the other modalities of Eq. 4's score; 0 for a sample without negatives."""
        others = [modality for modality in evidence.server_outputs if modality != evidence.output]
        if not others:
            raise ConfigError(
                f"weighting 'gca' contrasts '{evidence.output}' with another modality, but the server has none; "
                "choose 'sed', which needs no other"
            )
        contrasts = [
            evidence.compared(name, {"positive", "negatives_lse"}, tau=self.tau, mask_siblings=self.mask_siblings)
            for name in others
        ]
        return torch.stack([self._score(statistics) for statistics in contrasts]).mean(0)

    def _score(self, statistics: Statistics) -> Float[Tensor, " n"]:
        if self.include_self:
            return log_share(statistics)
        positive, negatives = statistics["positive"], statistics["negatives_lse"]
        # with no negative the difference is infinite, and one client would outweigh all
        return (positive - negatives).masked_fill_(negatives == -math.inf, 0)


class SED(Weighting):
    """Similarity-guided ensemble distillation (FedAFD, arXiv 2603.04890).

    log softmax_j(cos(u_k, g_j) / T) at j = k, g being the server's representations of the same modality. Cosines lie in
    [-1, 1]: at T = 1 one client at cosine 0.9 gets hardly more than twice the weight of one at 0.05.
    """

    short_name: ClassVar[str] = "sed"

    temperature: float = Field(default=1.0, gt=0, description="T, by which cosines are divided; the paper has none: 1")
    mask_siblings: bool = Field(default=False, description="leave captions of the same image out of the softmax")

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        statistics = evidence.statistics(
            {"positive", "negatives_lse"}, tau=self.temperature, mask_siblings=self.mask_siblings
        )
        return log_share(statistics)


class Entropy(Weighting):
    """Selective ensemble of FedGEMS (Cheng et al., arXiv 2110.11027): softmax over clients of 1 / H(p).

    p = softmax(x / tau), x being the row of cosines to the server's representations of the same modality; clients whose
    argmax is not the sample itself do not count. FedGEMS has class scores and true classes in their place; this version
    is unpublished, and at tau = 1 its entropies are all near log |P|.
    """

    short_name: ClassVar[str] = "entropy"

    tau: float = Field(default=1.0, gt=0, description="temperature of the softmax whose entropy is taken")
    floor: float = Field(default=1e-3, gt=0, description="smallest entropy, in nats: 1 / H is 1 / floor at most")
    mask_siblings: bool = Field(default=False, description="a caption of the same image ranked first is right too")

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """1 / H, since the softmax over clients is taken of it; -inf where the client is wrong."""
        truth = evidence.truth()
        statistics = evidence.statistics({"winner", "entropy"}, tau=self.tau, mask_siblings=self.mask_siblings)
        # a one-hot prediction has entropy 0, whose inverse would silence all others
        certainty = statistics["entropy"].clamp(min=self.floor).reciprocal()
        return certainty.masked_fill_(statistics["winner"] != truth, -math.inf)


class Margin(Weighting):
    """softmax over clients of (x_kk - max_{j != k} x_kj) / tau, x being cosines to the server's own modality.

    In the spirit of what FedAFD (arXiv 2603.04890) compares with as boundary-aware distillation weights (FedDFA), whose
    formula is unpublished.
    """

    short_name: ClassVar[str] = "margin"

    tau: float = Field(default=1.0, gt=0, description="temperature of the softmax over clients")
    mask_siblings: bool = Field(default=False, description="captions of the same image are not rivals")

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """The margin over tau; 0 for a sample that has no rival."""
        statistics = evidence.statistics({"positive", "best_negative"}, tau=self.tau, mask_siblings=self.mask_siblings)
        margin = statistics["positive"] - statistics["best_negative"]
        return margin.masked_fill_(statistics["best_negative"] == -math.inf, 0)


class Variance(Weighting):
    """Weighted consensus of FedET (Cho et al., IJCAI 2022): Var_j(x_kj).

    A client that separates classes spreads its scores. Here x is the row of cosines to the server's representations of
    the same modality; that version is unpublished. Temperatures cancel.
    """

    short_name: ClassVar[str] = "variance"

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """Log of the variance; -inf where all scores are equal."""
        return evidence.statistics({"variance"})["variance"].log()
