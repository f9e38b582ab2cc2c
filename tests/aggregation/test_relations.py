"""What clients see alike, weighed pair by pair: against loops, and what a client's own space has to do with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.ensemble import Ensembled, Rows, relational_losses, relations
from polyfed.losses.distillation import relational_kl

N, WIDTH = 9, 5
INDEX = torch.tensor([7, 0, 4, 2])


def rows(seed: int) -> Rows:
    stream = torch.Generator().manual_seed(seed)
    return Rows(F.normalize(torch.randn(N, WIDTH, generator=stream), dim=1), torch.randn(N, generator=stream))


@pytest.fixture
def sent() -> dict[str, dict[str, Rows]]:
    """``a`` and ``c`` send both, ``b`` pictures alone."""
    return {"image": {"a": rows(1), "b": rows(2), "c": rows(3)}, "text": {"c": rows(4), "a": rows(5)}}


def ensembled(clients: dict[str, Rows]) -> Ensembled:
    return Ensembled(torch.zeros(N, WIDTH), torch.ones(N, dtype=torch.bool), clients)


@pytest.mark.parametrize(("one", "other"), [("image", "image"), ("image", "text"), ("text", "image"), ("text", "text")])
def test_equals_loops(sent: dict[str, dict[str, Rows]], one: str, other: str) -> None:
    sent["image"]["a"].log_weights[0] = -math.inf  # does not count there
    found = relations(sent[one], sent[other], INDEX)
    for s, place in enumerate(INDEX.tolist()):
        for t, partner in enumerate(INDEX.tolist()):
            total = norm = 0.0
            for client in sent[one].keys() & sent[other].keys():
                own, compared = sent[one][client], sent[other][client]
                weight = math.exp(float(own.log_weights[place] + compared.log_weights[partner]) / 2)
                total, norm = total + weight * float(own.values[place] @ compared.values[partner]), norm + weight
            assert float(found.cosines[s, t]) == pytest.approx(total / norm, abs=1e-6)
            assert found.known[s, t]


def test_a_client_that_turns_its_space_changes_nothing(sent: dict[str, dict[str, Rows]]) -> None:
    before = [relations(sent[one], sent[other], INDEX).cosines for one in sent for other in sent]
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(6)))[0]
    for clients in sent.values():
        clients["a"] = clients["a"]._replace(values=2 * clients["a"].values @ turn)
    after = [relations(sent[one], sent[other], INDEX).cosines for one in sent for other in sent]
    torch.testing.assert_close(after, before)


def test_nobody_sent_both(sent: dict[str, dict[str, Rows]]) -> None:
    found = relations({"b": sent["image"]["b"]}, sent["text"], INDEX)
    assert not found.known.any()
    assert not found.cosines.any()


def test_losses_by_output_compare_other_items_within_and_all_across(sent: dict[str, dict[str, Rows]]) -> None:
    student = {name: torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k)) for k, name in enumerate(sent)}
    items = torch.tensor([3, 3, 1, 0])  # the first two are siblings
    targets = {name: ensembled(clients) for name, clients in sent.items()}
    losses = relational_losses(student, targets, INDEX, items, 0.1)
    strangers = torch.tensor([[k != j for k in (3, 3, 1, 0)] for j in (3, 3, 1, 0)])
    for name in sent:
        parts: list[Tensor] = []
        for other in sent:
            known = strangers if other == name else torch.ones(4, 4, dtype=torch.bool)
            taught = relations(sent[name], sent[other], INDEX).cosines
            parts.append(relational_kl(student[name], student[other], taught, known, 0.1))
        assert float(losses[name]) == pytest.approx(float(sum(parts)) / 2, rel=1e-6)
