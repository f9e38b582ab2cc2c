import torch
from torch.nn import functional as F

from polyfed.models.heads import LinearHead, NonNegativeHead, SimilarityHead


def test_linear_head_is_the_plain_classifier():
    head = LinearHead(4, 3)
    x = torch.randn(2, 4)
    assert torch.equal(head(x), x @ head.weight.T + head.bias)
    assert LinearHead(4, 3, bias=False).bias is None


def test_non_negative_head_uses_positive_weights_and_scale():
    head = NonNegativeHead(2, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, -1.0], [0.5, 2.0]]))
    # scale 128: 128 * (1 * 2 + 0 * 3) and 128 * (0.5 * 2 + 2 * 3)
    assert head(torch.tensor([[2.0, 3.0]])).tolist() == [[256.0, 896.0]]
    assert head.positive_weight.tolist() == [[1.0, 0.0], [0.5, 2.0]]


def test_every_weight_of_the_non_negative_head_can_learn_from_the_start():
    head = NonNegativeHead(16, 5, scale=1.0)
    F.cross_entropy(head(torch.randn(8, 16)), torch.arange(8) % 5).backward()
    assert (head.weight > 0).all()
    assert (head.weight.grad != 0).all()


def test_cosines_with_classes_are_in_full_precision_under_autocast():
    vectors, x = F.normalize(torch.randn(30, 64) + 2, dim=-1), torch.randn(8, 64) + 1
    head = SimilarityHead(vectors, 0.01)
    with torch.autocast("cpu", torch.bfloat16):
        scores = head(x)
        halves = SimilarityHead(vectors.bfloat16(), 0.01)(x.bfloat16())
    torch.testing.assert_close(scores, F.normalize(x, dim=-1) @ vectors.T / 0.01)
    torch.testing.assert_close(halves, F.normalize(x.bfloat16().float(), dim=-1) @ vectors.bfloat16().float().T / 0.01)


def test_bias_is_optional():
    assert NonNegativeHead(4, 3).bias is None
    assert NonNegativeHead(4, 3, bias=True)(torch.zeros(1, 4)).tolist() == [[0.0, 0.0, 0.0]]
