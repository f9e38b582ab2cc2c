"""Properties of all losses: precision under autocast, gradients, the order of the batch, and NaN."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from papers.fedaid.objectives import local_contrast, prototype_alignment, sinkhorn, token_alignment
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.adversarial import minimax, non_saturating, separation
from polyfed.losses.classification import class_separation, margin_cross_entropy
from polyfed.losses.contrast import inter_modal, intra_modal, model_contrast, queue_contrast
from polyfed.losses.distillation import DISTILLATIONS, score_kl, similarity_kl, squared_distance
from polyfed.losses.info_nce import info_nce
from polyfed.losses.segmentation import focal_dice
from polyfed.losses.self_supervised import byol
from polyfed.losses.soft_contrastive import soft_contrastive


@dataclass(frozen=True)
class Case:
    """A loss of a batch of six.

    Attributes:
        loss: Function of tensors.
        shapes: Shapes of its tensors; tensors of six rows are batches.
        learn: places of those that get a gradient.
        unit: whether rows have unit norm.
        other: further tensors, such as labels; those of six rows are of the batch.
    """

    loss: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    learn: tuple[int, ...]
    unit: bool = False
    other: tuple[Tensor, ...] = ()

    def tensors(self) -> list[Tensor]:
        stream = torch.Generator().manual_seed(3)
        drawn = [torch.randn(shape, dtype=torch.float64, generator=stream) for shape in self.shapes]
        return [F.normalize(x, dim=-1) if self.unit and x.ndim > 1 else x for x in drawn]


BATCH, PAIR, LABELS = (6, 4), ((6, 4), (6, 4)), torch.tensor([0, 1, 3, 3, 2, 1])
ITEMS = torch.tensor([0, 0, 1, 2, 3, 3])
MASKS = torch.rand(6, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.4

CASES = {
    **{name: Case(loss, PAIR, (0,), other=(ITEMS < 3,)) for name, loss in DISTILLATIONS.items()},
    "squared_distance": Case(squared_distance, PAIR, (0, 1)),
    "score_kl": Case(lambda *x: score_kl(*x, 0.5).mean(), PAIR, (0,)),
    "similarity_kl": Case(lambda *x: similarity_kl(*x, 0.5, chunk=4).mean(), (*PAIR, (9, 4)), (0,), unit=True),
    "inter_modal": Case(lambda u, a, k: inter_modal(u, a, k, 0.5, chunk=4), (BATCH, (9, 4)), (0,), True, (LABELS,)),
    "intra_modal": Case(intra_modal, (*PAIR, BATCH), (0,), unit=True),
    "model_contrast": Case(model_contrast, (*PAIR, BATCH), (0,)),
    "queue_contrast": Case(
        lambda s, t, q, i: queue_contrast(s, t, q.detach(), i, torch.arange(7) + 4),
        (*PAIR, (7, 4)),
        (0, 1),
        True,
        (ITEMS,),
    ),
    "margin_cross_entropy": Case(margin_cross_entropy, (BATCH,), (0,), other=(LABELS,)),
    "class_separation": Case(class_separation, (BATCH,), (0,)),
    "info_nce": Case(lambda u, v, i: info_nce(u, v, 4.0, i), PAIR, (0, 1), True, (ITEMS,)),
    "soft_contrastive": Case(
        lambda u, v, i: soft_contrastive(u, v, torch.tensor(7.0), torch.tensor(9.0), i), PAIR, (0, 1), True, (ITEMS,)
    ),
    "byol": Case(byol, PAIR, (0,)),
    "separation": Case(separation, ((6,), (6,)), (0, 1)),
    "minimax": Case(minimax, ((6,), (6,)), (0, 1)),
    "non_saturating": Case(non_saturating, ((6,), (6,)), (1,)),
    "focal_dice": Case(focal_dice, ((6, 3, 3),), (0,), other=(MASKS,)),
    "local_contrast": Case(local_contrast, ((6, 3, 4), (6, 5, 4)), (0, 1)),
    "token_alignment": Case(
        lambda t, o, w: token_alignment(t, o, w.softmax(1)), ((6, 3, 4), (6, 5, 4), (6, 3)), (0, 1, 2)
    ),
    "prototype_alignment": Case(prototype_alignment, (*PAIR, (5, 4)), (0, 1, 2), unit=True),
    "sinkhorn": Case(lambda scores: sinkhorn(scores).square().sum(), (BATCH,), ()),
}

every_loss = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_loss
def test_16_bits_and_autocast_are_computed_in_full_precision(case: Case) -> None:
    halves = [x.bfloat16() for x in case.tensors()]
    expected = case.loss(*(x.float() for x in halves), *case.other)
    with torch.autocast("cpu", torch.bfloat16):
        inside = case.loss(*halves, *case.other)
    assert inside.dtype == torch.float32
    # sums of a loss that is written here, and not in the package, are of 64 bits nowhere
    torch.testing.assert_close(inside, expected, rtol=1e-3, atol=1e-5)


@every_loss
def test_gradients_are_those_of_the_formula_and_constants_get_none(case: Case) -> None:
    tensors = [x.requires_grad_() for x in case.tensors()]
    loss = case.loss(*tensors, *case.other)
    if not case.learn:
        assert not loss.requires_grad
        return
    loss.backward()
    assert tuple(place for place, x in enumerate(tensors) if x.grad is not None and bool(x.grad.any())) == case.learn

    def of_learners(*live: Tensor) -> Tensor:
        values = [x.detach() for x in tensors]
        for place, value in zip(case.learn, live, strict=True):
            values[place] = value
        return case.loss(*values, *case.other)

    if "prototype_alignment" not in case.loss.__name__:  # whose assignments are constants, which a difference moves
        assert torch.autograd.gradcheck(of_learners, [tensors[place].detach().requires_grad_() for place in case.learn])


@every_loss
def test_the_order_of_the_batch_does_not_matter(case: Case) -> None:
    order = torch.tensor([3, 0, 4, 1, 5, 2])
    tensors = [*case.tensors(), *case.other]
    torch.testing.assert_close(case.loss(*[x[order] if len(x) == 6 else x for x in tensors]), case.loss(*tensors))


@every_loss
def test_nan_is_not_hidden(case: Case) -> None:
    tensors = case.tensors()
    for x in tensors:
        x[0] = torch.nan
    assert bool(case.loss(*tensors, *case.other).isnan())
