"""Statistics of the rows of a |P| x |P| similarity in one pass over its tiles, or of rows of class scores."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyfed.core.errors import ConfigError, PayloadError
from polyfed.losses.log_sum_exp import BoundedLogSumExp, RunningEntropy, RunningLogSumExp

Statistic = Literal["positive", "negatives_lse", "lse", "best_negative", "winner", "entropy", "variance"]
Statistics = dict[Statistic, Tensor]

# those that need every logit; the variance follows from the anchors' covariance
_SCANNED: frozenset[Statistic] = frozenset(("positive", "negatives_lse", "lse", "best_negative", "winner", "entropy"))
_SUMS: frozenset[Statistic] = frozenset(("negatives_lse", "lse", "entropy"))
RIVALS: frozenset[Statistic] = frozenset(("best_negative", "winner"))

_CHUNK = 1024  # vectors at a time, where no tile is made
_ROUNDING = 4.0  # logits closer than so many eps |u| |g| tie: products of a pair vary by that between tiles
_RANGE = 80.0
"""Logits within +-80 bits need no shift: 2^80 x 10^9 terms and 2^-80 are both normal fp32 numbers."""

Families = tuple[Int[Tensor, " P"], Int[Tensor, " P"]]
"""First anchor and number of anchors of each anchor's item, on the CPU."""


def row_statistics(
    rows: Float[Tensor, "r d"],
    anchors: Float[Tensor, "P d"],
    wanted: Collection[Statistic],
    *,
    of: Int[Tensor, " n"] | None = None,
    own: Int[Tensor, " n"] | None = None,
    tau: float = 1.0,
    items: Int[Tensor, " P"] | None = None,
    counts: Float[Tensor, " P"] | None = None,
    blocks: TileSize | None = None,
) -> Statistics:
    """Statistics of the logits x_kj = u_k . g_j / tau of each sample k, in one pass; no matrix is held.

    Rows of several clients can share a pass: concatenate them, and their ``own``. A row or an anchor that several
    samples have need stand there but once, with ``of`` and ``counts``; j runs over the samples all the same. All but
    ``winner`` are in nats and in fp32 at least; o is the sample's own anchor:

    * ``positive``: x_ko;
    * ``negatives_lse``: log sum_{j != o} exp x_kj, -inf without another anchor;
    * ``lse``: log sum_j exp x_kj;
    * ``best_negative``: max_{j != o} x_kj, -inf without another anchor;
    * ``winner``: argmax_j x_kj as int64; o where it ties for the largest, else the lowest index that does;
    * ``entropy``: of softmax_j x_kj;
    * ``variance``: of x_kj over j (population); O(n d^2), without the pass.

    Args:
        rows: u, representations that clients sent.
        anchors: g, the server's representations of the public set.
        wanted: names of the statistics.
        of: index of each sample's row; None: sample k's is k. The own anchors of a row's samples follow each other.
        own: index of each sample's own anchor; None: sample k's is k.
        tau: temperature.
        items: ascending item number of each anchor. Anchors of one item (captions of an image) are not rivals of
            each other: left out of ``negatives_lse`` and ``best_negative``, and where one of them wins, o does.
        counts: how many samples have each anchor; None: one. Of the own anchor all but one are negatives, unless they
            are of its item.
        blocks: size of a tile; None: suited to the device.

    Raises:
        PayloadError: shapes do not match, or an own anchor does not exist.
        ConfigError: tau is not positive, or items are not ascending.

    >>> anchors = torch.eye(3)
    >>> statistics = row_statistics(anchors, anchors, {"winner", "lse"}, tau=0.5)
    >>> statistics["winner"].tolist(), [round(x, 2) for x in statistics["lse"].tolist()]
    ([0, 1, 2], [2.24, 2.24, 2.24])
    """
    of = torch.arange(len(rows)) if of is None else of.cpu()
    own = torch.arange(len(of)) if own is None else own.cpu()
    _check(rows, anchors, of, own, tau)
    if len(own) == 0:  # of the right types all the same: parts of clients are put together
        empty = torch.empty(0, dtype=working_dtype(rows, anchors), device=rows.device)
        return dict.fromkeys(wanted, empty) | ({"winner": empty.long()} if "winner" in wanted else {})
    statistics: Statistics = {}
    if _SCANNED & set(wanted):
        scan = _Scan(rows, anchors, wanted, tau, items, counts, blocks or TileSize.suited(rows.device))
        statistics = scan.statistics(rows, of, own)
    if "variance" in wanted:
        statistics["variance"] = _variances(rows, anchors, tau, counts)[of.to(rows.device)]
    return {name: statistics[name] for name in wanted}


class _Scan:
    """One pass over rows x anchors. Its logits are in bits (x / ln 2)."""

    def __init__(
        self,
        rows: Float[Tensor, "n d"],
        anchors: Float[Tensor, "P d"],
        wanted: Collection[Statistic],
        tau: float,
        items: Int[Tensor, " P"] | None,
        counts: Float[Tensor, " P"] | None,
        blocks: TileSize,
    ) -> None:
        self.anchors, self.wanted, self.blocks = anchors, set(wanted), blocks
        self.scale, self.dtype = 1 / (tau * math.log(2)), working_dtype(rows, anchors)
        self.counts = None if counts is None else counts.to(rows.device, self.dtype)
        # on the CPU, where the scan decides tile by tile whether a row's own item is in it
        self.families = families_of(items, len(anchors))
        self.masked = items is not None
        self.bounded = largest_logit(rows, anchors) * self.scale <= _RANGE
        # scale of rounding errors: ties are distinguished from differences by it
        self.reach = torch.linalg.vector_norm(anchors, dim=1, dtype=self.dtype).amax()
        self.workspace = torch.empty(blocks.rows * blocks.columns, dtype=self.dtype, device=rows.device)
        # allocating it tile by tile would leave the heap full of holes
        self.scratch = torch.empty_like(self.workspace) if "entropy" in self.wanted else self.workspace[:0]

    def statistics(self, rows: Float[Tensor, "r d"], of: Int[Tensor, " n"], own: Int[Tensor, " n"]) -> Statistics:
        order = of.argsort(stable=True)  # the samples of a row go with it
        parts, place = list(self.parts(rows, of[order], own[order])), order.argsort().to(rows.device)
        return {name: torch.cat([part[name] for part in parts])[place] for name in parts[0]}

    def parts(self, rows: Float[Tensor, "r d"], of: Int[Tensor, " n"], own: Int[Tensor, " n"]) -> Iterator[Statistics]:
        """The statistics of the samples of block after block of rows; ``of`` ascends."""
        size = self.blocks.rows
        ends = torch.searchsorted(of, torch.arange(0, len(rows) + size, size)).tolist()
        for number, block in enumerate(torch.split(rows, size)):
            here = slice(ends[number], ends[number + 1])
            if here.start < here.stop:
                yield self.part(block.to(self.dtype).mul(self.scale), of[here] - number * size, own[here])

    def part(self, vectors: Float[Tensor, "r d"], of: Int[Tensor, " s"], own: Int[Tensor, " s"]) -> Statistics:
        """The statistics of the samples of one block, whose ``vectors`` are scaled to bits."""
        family = Family(self.families, of, own, vectors)
        running, rivals = self.running_sum(vectors), None
        if RIVALS & self.wanted:
            rivals = Rivals(self.hurdle(vectors, of, own))
        for first, tile in self.tiles(vectors):
            family.take(tile, first)
            largest = None if rivals is None else rivals.add(tile, first)
            if running is not None:
                counts = None if self.counts is None else self.counts[first : first + tile.shape[1]]
                running.add(tile, largest, counts)
        of, near = of.to(vectors.device), family.seen(self.families, of, own, self.counts, masked=self.masked)
        statistics: Statistics = {"positive": near.positive}
        if rivals is not None:
            best, index = near.better_of(rivals.best[of], rivals.index[of])
            # a rival must beat every sibling, by more than rounding
            wins = best > near.kin.amax(1) + self.slack(vectors)[of]
            statistics |= {"best_negative": best, "winner": torch.where(wins, index, own.to(wins.device))}
        if running is not None:
            sums = running.of_rows(of)
            sums.add(near.rivals, counts=near.rival_counts)
            statistics["negatives_lse"] = sums.result()
            if {"lse", "entropy"} & self.wanted:
                sums.add(near.kin, counts=near.kin_counts)  # overwrites them: nothing else needs them from here on
                statistics["lse"] = sums.result()
            if isinstance(sums, RunningEntropy):
                statistics["entropy"] = sums.entropy()
        return {name: value if name == "winner" else value * math.log(2) for name, value in statistics.items()}

    def slack(self, vectors: Float[Tensor, "r d"]) -> Float[Tensor, " r"]:
        slack: Tensor = torch.linalg.vector_norm(vectors, dim=1) * self.reach
        return slack * (_ROUNDING * torch.finfo(self.dtype).eps)

    def hurdle(self, vectors: Float[Tensor, "r d"], of: Int[Tensor, " s"], own: Int[Tensor, " s"]) -> Tensor:
        """Least logit of a rival of a row [r] for its index to matter: the least logit of an own anchor of its
        samples, or +inf if winners are not wanted."""
        hurdle = vectors.new_full((len(vectors),), math.inf)
        if "winner" not in self.wanted:
            return hurdle
        of, partners = of.to(vectors.device), self.anchors[own.to(self.anchors.device)].to(self.dtype)
        # an estimate is enough here: the own logit itself comes out of the tile
        logits: Tensor = torch.linalg.vecdot(vectors[of], partners)
        return hurdle.scatter_reduce_(0, of, logits - self.slack(vectors)[of], "amin")

    def running_sum(self, vectors: Float[Tensor, "r d"]) -> RunningLogSumExp | None:
        if not _SUMS & self.wanted:
            return None
        like = vectors.new_empty(len(vectors))
        if "entropy" in self.wanted:
            return RunningEntropy(like, self.scratch)
        return BoundedLogSumExp(like, 2) if self.bounded else RunningLogSumExp(like, 2)

    def tiles(self, vectors: Float[Tensor, "r d"]) -> Iterator[tuple[int, Float[Tensor, "r m"]]]:
        for first in range(0, len(self.anchors), self.blocks.columns):
            anchors = self.anchors[first : first + self.blocks.columns].to(self.dtype)
            tile = self.workspace[: len(vectors) * len(anchors)].view(len(vectors), len(anchors))
            torch.mm(vectors, anchors.T, out=tile)
            yield first, tile


class Rivals:
    """Largest logit of each row; and its index, the lowest if several, in rows where it exceeds ``hurdle``."""

    def __init__(self, hurdle: Float[Tensor, " r"]) -> None:
        self.hurdle, self.best = hurdle, torch.full_like(hurdle, -math.inf)
        self.index = torch.zeros(len(hurdle), dtype=torch.int64, device=hurdle.device)
        self.sparse = hurdle.device.type == "cpu"

    def add(self, tile: Float[Tensor, "r m"], first: int) -> Float[Tensor, " r"]:
        """Look through the tile that begins at column ``first``; returns the largest logit of each of its rows."""
        if self.sparse:  # on a CPU a search takes 14 times as long as a maximum: search the few rows that improve
            top = tile.amax(1)
            better = (top > torch.maximum(self.best, self.hurdle)).nonzero().squeeze(1)
            self.index[better] = tile[better].argmax(1) + first
        else:
            top, index = tile.max(1)
            self.index = torch.where(top > self.best, index + first, self.index)
        self.best = torch.maximum(self.best, top)
        return top


def _variances(
    rows: Float[Tensor, "r d"], anchors: Float[Tensor, "P d"], tau: float, counts: Float[Tensor, " P"] | None
) -> Float[Tensor, " r"]:
    """Var_j(u . g_j / tau) = u^T Cov(g) u / tau^2."""
    dtype = working_dtype(rows, anchors)
    shares = anchors.new_ones(len(anchors), dtype=dtype) if counts is None else counts.to(anchors.device, dtype)
    shares = shares / shares.sum()
    # centred first: the difference of two large squares would lose the variance
    mean = shares @ anchors.to(dtype)
    covariance = mean.new_zeros(len(mean), len(mean))
    for part, share in zip(torch.split(anchors, _CHUNK), torch.split(shares, _CHUNK), strict=True):
        centred = part.to(dtype) - mean
        covariance.addmm_(centred.T, centred * share[:, None])
    variances, product = mean.new_empty(len(rows)), mean.new_empty(_CHUNK, len(mean))
    for part, out in zip(torch.split(rows, _CHUNK), torch.split(variances, _CHUNK), strict=True):
        vectors = part.to(dtype)
        turned = torch.mm(vectors, covariance, out=product[: len(part)])
        torch.sum(turned.mul_(vectors), 1, out=out)
    return variances.clamp_(min=0).div_(tau**2)


def _check(rows: Tensor, anchors: Tensor, of: Tensor, own: Tensor, tau: float) -> None:
    if not tau > 0:
        raise ConfigError(f"tau is {tau}; a temperature must be positive")
    if rows.shape[1] != anchors.shape[1] or len(own) != len(of):
        raise PayloadError(
            f"rows have shape {tuple(rows.shape)}, anchors {tuple(anchors.shape)}, and of {len(of)} samples {len(own)} "
            "have an own anchor; both must have the same width, and every sample an own anchor"
        )
    for what, index, count in (("rows", of, len(rows)), ("own anchors", own, len(anchors))):
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
            raise PayloadError(
                f"{what} of samples reach from {int(index.min())} to {int(index.max())}, but there are {count}; "
                f"valid: 0 to {count - 1}"
            )


# ---- tiles of the matrix of logits that is never held, and the logits of kin that are moved out of them


class TileSize(NamedTuple):
    """Size of a tile."""

    rows: int
    columns: int

    @classmethod
    def suited(cls, device: torch.device) -> TileSize:
        """1 MiB tiles that stay in a core's cache, or 32 MiB ones that fill a GPU."""
        return cls(256, 1024) if device.type == "cpu" else cls(4096, 2048)


def working_dtype(local: Tensor, other: Tensor) -> torch.dtype:
    """The wider of both types, and fp32 at least."""
    return torch.promote_types(torch.promote_types(local.dtype, other.dtype), torch.float32)


def largest_logit(local: Tensor, other: Tensor) -> float:
    """Bound on |u_k . g_j| by Cauchy-Schwarz: 1 for unit vectors."""
    norms = [torch.linalg.vector_norm(side, dim=1, dtype=working_dtype(side, side)).amax() for side in (local, other)]
    return float(norms[0] * norms[1])


def families_of(items: Int[Tensor, " P"] | None, count: int) -> Families:
    """First anchor and number of anchors of each anchor's item, on the CPU."""
    if items is None:
        return torch.arange(count), torch.ones(count, dtype=torch.int64)
    items = items.cpu()
    if len(items) != count:
        raise PayloadError(f"{len(items)} item numbers for {count} anchors; give one an anchor")
    if bool((items.diff() < 0).any()):
        raise ConfigError("item numbers are not ascending; samples of an item must follow each other")
    _, index, sizes = torch.unique_consecutive(items, return_inverse=True, return_counts=True)
    return (sizes.cumsum(0) - sizes)[index], sizes[index]


class Near(NamedTuple):
    """Logits of samples against the anchors of their row's run, kin and others apart: -inf where not so."""

    positive: Float[Tensor, " s"]
    columns: Int[Tensor, "s f"]
    rivals: Float[Tensor, "s f"]
    rival_counts: Float[Tensor, "s f"]
    kin: Float[Tensor, "s f"]
    kin_counts: Float[Tensor, "s f"]

    def better_of(self, best: Float[Tensor, " s"], index: Int[Tensor, " s"]) -> tuple[Tensor, Tensor]:
        """The largest logit of a rival and its index, given those beyond the run; of equals the lowest index."""
        top, place = self.rivals.max(1)
        column = self.columns.gather(1, place[:, None]).squeeze(1)
        nearer = (top > best) | ((top == best) & (column < index))
        return torch.maximum(best, top), torch.where(nearer, column, index)


class Family:
    """Logits of a block's rows against a run of anchors that holds those of all items of the row's samples."""

    def __init__(
        self, families: Families, of: Int[Tensor, " s"], own: Int[Tensor, " s"], vectors: Float[Tensor, "r d"]
    ) -> None:
        starts, sizes = (part[own] for part in families)
        # a row without samples has an empty run
        self.starts = torch.full((len(vectors),), len(families[0])).scatter_reduce_(0, of, starts, "amin")
        ends = torch.zeros_like(self.starts).scatter_reduce_(0, of, starts + sizes, "amax")
        offsets = torch.arange(int((ends - self.starts).max()))
        self.columns = self.starts[:, None] + offsets
        self.real = self.columns < ends[:, None]
        self.first, self.last = int(self.starts.min()), int(ends.max())
        self.logits = vectors.new_full(self.columns.shape, -math.inf)

    def take(self, tile: Float[Tensor, "r m"], first: int) -> None:
        """Move them out of the tile that begins at column ``first``: -inf remains."""
        end = first + tile.shape[1]
        if self.last <= first or self.first >= end:
            return
        rows, offsets = (self.real & (self.columns >= first) & (self.columns < end)).nonzero(as_tuple=True)
        columns = (self.columns[rows, offsets] - first).to(tile.device)
        rows, offsets = rows.to(tile.device), offsets.to(tile.device)
        self.logits[rows, offsets] = tile[rows, columns]
        tile[rows, columns] = -math.inf

    def seen(
        self,
        families: Families,
        of: Int[Tensor, " s"],
        own: Int[Tensor, " s"],
        counts: Float[Tensor, " P"] | None,
        *,
        masked: bool,
    ) -> Near:
        """Log-odds of each sample of the block."""
        device, (starts, sizes) = self.logits.device, (part[own][:, None] for part in families)
        columns, real = self.columns[of], self.real[of]
        inside = columns.clamp_max(len(families[0]) - 1).to(device)
        times = real.to(device, self.logits.dtype) * (1 if counts is None else counts[inside])
        kin = ((columns >= starts) & (columns < starts + sizes)).to(device)
        # without items, the other samples of the own anchor are negatives
        kin_counts = times * kin if masked else kin.to(times)
        logits, rival_counts = self.logits[of.to(device)], times - kin_counts
        place = (own - self.starts[of])[:, None].to(device)
        return Near(
            logits.gather(1, place).squeeze(1),
            columns.to(device),
            logits.masked_fill(rival_counts <= 0, -math.inf),
            rival_counts,
            logits.masked_fill(~kin, -math.inf),
            kin_counts,
        )
