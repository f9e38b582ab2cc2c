"""Clients that are like the server or unlike it, and what a weighting makes of them."""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from polyfed.aggregation.ensemble import Ensemble
from polyfed.aggregation.weighting import Evidence, Weighting

SIZE, DIM, CLASSES = 12, 6, 5


def unit(*shape, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=stream, dtype=torch.float64), dim=-1)


def known(size=SIZE):
    return {"a": unit(size, DIM, seed=100), "b": unit(size, DIM, seed=101), "c": unit(size, DIM, seed=102)}


def client(seed, modalities=1, size=SIZE):
    """One whose representations are near the server's in modality a, the nearer the lower ``seed``, not normalised."""
    values = known(size)["a"] + (0.2 + 0.1 * seed) * unit(size, DIM, seed=seed)
    return SimpleNamespace(values=(2 + seed) * values, examples=10 * (seed + 1), modalities=modalities)


def voter(seed, modalities=1):
    """One that sends class scores, right for most."""
    noise = torch.randn(SIZE, CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = 2 * torch.eye(CLASSES, dtype=torch.float64)[labels()] + noise
    return SimpleNamespace(values=scores, examples=10 * (seed + 1), modalities=modalities)


def labels():
    return torch.arange(SIZE) % CLASSES


def evidence(sent, output="a", of=None, **changes):
    server = known(len(sent.values)) if of is None else of
    return Evidence(sent.values, output, server, sent.examples, sent.modalities, **changes)


def choose(name, **fields):
    return Weighting.model_validate({"name": name, **fields})


def ensemble(weighting, sent, **changes):
    result = Ensemble(*sent[0].values.shape, dtype=torch.float64)
    for one in sent:
        result.add(one.values, weighting.log_weights(evidence(one, **changes)))
    return result
