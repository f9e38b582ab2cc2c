"""The attention over teachers, by hand."""

import math

import pytest
import torch

from polyfed.algorithms.fedmkd import TeacherAttention


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return TeacherAttention({"a": 4, "b": 6}, scores=3).double()


def drawn(teachers=3, width=6):
    torch.manual_seed(1)
    return torch.randn(5, width, dtype=torch.float64), torch.randn(teachers, 5, width, dtype=torch.float64)


def test_it_is_the_softmax_of_products_of_query_and_keys(attention):
    student, teachers = drawn()
    targets, weights = attention("b", student, teachers)
    adapter = attention.adapters[1]
    for k in range(5):
        query = adapter(student[k]).tolist()
        logits = []
        for teacher in teachers:
            key = adapter(teacher[k]).tolist()
            logits.append(sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(3))
        total = sum(math.exp(x) for x in logits)
        shares = [math.exp(x) / total for x in logits]
        assert weights[:, k].tolist() == pytest.approx(shares)
        expected = sum(share * teacher[k] for share, teacher in zip(shares, teachers, strict=True))
        assert torch.allclose(targets[k], expected)


def test_channels_have_adapters_of_their_own_and_any_name():
    attention = TeacherAttention({"first.view": 4, "second view": 6})
    assert attention("first.view", torch.zeros(2, 4), torch.zeros(1, 2, 4))[0].shape == (2, 4)
    assert attention("second view", torch.zeros(2, 6), torch.zeros(1, 2, 6))[0].shape == (2, 6)


def test_one_teacher_is_the_target_and_their_order_does_not_matter(attention):
    student, teachers = drawn()
    assert torch.allclose(attention("b", student, teachers[:1])[0], teachers[0])
    order = torch.tensor([2, 0, 1])
    (first, weights), (second, moved) = (attention("b", student, rows) for rows in (teachers, teachers[order]))
    assert torch.allclose(first, second)
    assert torch.allclose(weights[order], moved)
    assert torch.allclose(weights.sum(0), torch.ones(5, dtype=torch.float64))


def test_the_adapter_learns_and_the_student_does_not_choose(attention):
    student, teachers = drawn()
    student.requires_grad_()
    attention("b", student, teachers)[0].square().sum().backward()
    assert student.grad is None
    assert all(float(value.grad.abs().sum()) > 0 for value in attention.adapters[1].parameters())
    assert all(value.grad is None for value in attention.adapters[0].parameters())
