"""FedMKD: a round, its losses and the attention over teachers by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from by_hand import naive_byol, unit
from polyfed.algorithms.fedmkd import Student, TeacherAttention, Teachers
from polyfed.core.randomness import generator
from polyfed.federation.server import Server
from polyfed.runs.config_files import merged
from polyfed.runs.session import Session
from polyfed.wire.payload import Payload
from sessions import first_cohort, of_samples, prepared, request, round_records, site_of, woken
from small_federations import Config, plain

METHOD = {"name": "fedmkd", "local_epochs": 1, "distiller": {"epochs": 2}, "byol": {"predictor_width": 16}}
RATE = 0.05


def session_of(tiny: Config, folder: Path, augment: bool = True, **algorithm: Any) -> tuple[Session, Any]:
    """Images have random views, texts have not."""
    config = copy.deepcopy(tiny)
    if augment:
        config["server"]["model"] = copy.deepcopy(config["server"]["model"])
        config["server"]["model"]["encoders"]["image"]["view"]["augment"] = {"flip": True, "erase": True, "shift": 2}
    session = prepared(config | {"algorithm": merged(METHOD, algorithm)}, folder)
    return session, session.experiment.algorithm


def student_of(method: Any, server: Server) -> tuple[Student, dict[str, Teachers]]:
    """A student, and three random teachers."""
    known = method.public.server_outputs(server)
    teachers = {name: Teachers(unit(3, *values.shape, seed=7), list("abc")) for name, values in known.items()}
    widths = {name: values.shape[1] for name, values in known.items()}
    return Student(method, method.distiller, server, method.public.drawn(server), widths), teachers


# ---- teachers


def test_teachers_are_the_clients_with_the_modality_at_unit_norm(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path / "a")
    twin, _ = session_of(tiny, tmp_path / "b")
    exchange = method.public.exchange(session.server)
    actual = method.teachers(exchange, first_cohort(session))
    for name, teachers in actual.items():
        ids = [info.id for info in twin.server.clients if name in info.modalities]
        assert teachers.senders == ids
        assert teachers.values.shape == (len(ids), *exchange.outputs[name].shape)
    for info in twin.server.clients:
        payload = Payload({"order": exchange.order, "channels": exchange.wanted.of(info)})
        sent = of_samples(twin, site_of(twin).handle(request(info.id, payload)).fields["knowledge"])
        name = next(iter(sent))
        rows = sent[name] / sent[name].norm(dim=1, keepdim=True)
        assert torch.allclose(actual[name].values[actual[name].senders.index(info.id)], rows, atol=1e-5), info.id


def test_a_client_trains_on_its_own_task_alone(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path / "a", augment=False)
    order, plain = session.server.order(), woken(session, "image")
    plain.fit(plain.train, epochs=1)
    payload = Payload({"order": order, "channels": '["image"]'})
    sent = of_samples(session, site_of(session).handle(request("image", payload)).fields["knowledge"])
    assert method.local_epochs == 1
    assert torch.equal(sent["image"], plain.represent(plain.public_set)["image"])


# ---- the student's step, by hand


def contrast_by_hand(
    student: Student, name: str, own: Tensor, teachers: Tensor, items: list[int], tau: float
) -> Tensor:
    adapter = copy.deepcopy(student.attention.adapters[student.attention.positions[name]]).double()
    own, teachers = F.normalize(own.double(), dim=1), teachers.double()
    targets = []
    for k in range(len(own)):
        query = adapter(own[k].detach())
        logits = torch.stack([query @ adapter(teacher[k]) for teacher in teachers]) / math.sqrt(10)
        target = sum(share * teacher[k] for share, teacher in zip(logits.softmax(0), teachers, strict=True))
        targets.append(target / target.norm())
    queue, owners = student.queue[f"values.{name}"].double(), student.queue[f"items.{name}"].tolist()
    losses = []
    for k in range(len(own)):
        remainder = [target for j, target in enumerate(targets) if items[j] != items[k]]
        remainder += [row for row, owner in zip(queue, owners, strict=True) if owner != items[k]]
        logits = torch.stack([own[k] @ row / tau for row in [targets[k], *remainder]])
        losses.append(logits.exp().sum().log() - logits[0])
    return torch.stack(losses).mean()


def test_the_contrast_and_its_queue_equal_plain_loops(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, contrast={"queue": 6, "temperature": 0.2})
    server = session.server
    server.model.eval()
    student, teachers = student_of(method, server)
    seen: dict[str, list[int]] = {name: [] for name in teachers}
    for index in (torch.tensor([0, 1, 40, 77]), torch.tensor([3, 20, 41, 60])):  # captions 0, 1 and 3 of one image
        batch = server.public_set.batch(index)
        for name, own in method.public.batch_outputs(server, server.model, batch, list(teachers)).items():
            messages, items = teachers[name].values[:, index], batch.items.tolist()
            expected = contrast_by_hand(student, name, own, messages, items, 0.2)
            assert float(student.contrast(name, own, messages, batch, method.contrast).detach()) == pytest.approx(
                float(expected.detach()), rel=1e-5
            )
            seen[name] = (items + seen[name])[:6]
            assert student.queue[f"items.{name}"].tolist() == seen[name]
            rows = student.queue[f"values.{name}"]
            assert torch.allclose(rows.norm(dim=1), torch.ones(len(seen[name])), atol=1e-5)
            assert not rows.requires_grad


def test_one_step_is_that_of_the_weighted_sum(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(
        tiny,
        tmp_path,
        distiller={"training": plain(RATE, 16), "weight": 0.5},
        byol={"weight": 0.3, "momentum": 0.9},
        contrast={"weight": 0.6},
    )
    server = session.server
    server.model.train()
    student, teachers = student_of(method, server)
    assert list(student.predictors) == ["image"]  # texts have no random view
    batch = server.public_set.batch(torch.tensor([2, 30, 51]), generator(1))
    again = server.public_set.batch(batch.index, server.generator("second-views"), ["image"])
    torch.manual_seed(3)  # of the dropout
    contrast = sum(
        contrast_by_hand(student, name, own, teachers[name].values[:, batch.index], batch.items.tolist(), 0.1)
        for name, own in method.public.batch_outputs(server, server.model, batch, list(teachers)).items()
    )
    own = copy.deepcopy(student.views.target.state_dict())
    encoder, views = server.model.encoders["image"], (batch.inputs["image"], again.inputs["image"])
    networks = encoder, student.views.target["image"], student.predictors["image"]
    byol = naive_byol(*networks, encoder(views[0]), *views)
    student.views.target.load_state_dict(own)  # batch statistics
    learning = {**dict(server.model.named_parameters()), **dict(student.predictors.named_parameters())}
    gradients = torch.autograd.grad(0.5 * (0.6 * contrast + 0.3 * byol), list(learning.values()), allow_unused=True)
    before = {name: value.detach().clone() for name, value in learning.items()}
    adapters = [value.detach().clone() for value in student.attention.parameters()]
    slow = [value.clone() for value in student.views.target.parameters()]
    torch.manual_seed(3)
    for _ in server.epochs(1):
        student.learn(batch, teachers)
    for (name, value), gradient in zip(learning.items(), gradients, strict=True):
        expected = before[name] if gradient is None else before[name] - RATE * gradient
        assert torch.allclose(value, expected, atol=1e-6), name
    assert any(not torch.equal(*pair) for pair in zip(adapters, student.attention.parameters(), strict=True))
    online = server.model.tower("image").parameters()
    for late, early, fast in zip(student.views.target.parameters(), slow, online, strict=True):
        assert torch.allclose(late, 0.9 * early + 0.1 * fast, atol=1e-6)
    assert student.means() == pytest.approx(
        {"contrast": float(contrast.detach()), "byol": float(byol.detach())}, rel=1e-4
    )


def test_without_random_views_the_contrast_is_all(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, augment=False)
    student, _ = student_of(method, session.server)
    assert len(student.predictors) == len(student.views.target) == 0
    method.round(session.server, first_cohort(session))
    names = {name for record in round_records(session) for name in record["metrics"]}
    assert "contrast" in names
    assert "byol" not in names


# ---- the attention over teachers


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
