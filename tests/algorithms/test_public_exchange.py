"""Methods over a public set: bounded rows, joint distillation, aligned ensembles, references that do not move."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from by_hand import unit
from polyfed.aggregation.ensemble import Alignment, Ensembled, Rows
from polyfed.aggregation.weighting import Mean
from polyfed.algorithms.shared.distiller import Distiller
from polyfed.algorithms.shared.public_exchange import PublicExchange, clip_row_norms
from polyfed.algorithms.shared.public_training import FrozenCopy, Remembered, Stored, interleave
from polyfed.algorithms.shared.teacher import Ensembles, Teacher
from polyfed.core.randomness import generator, isolated
from polyfed.data.samples import Batch
from polyfed.models.model import Model
from polyfed.wire.payload import Representations
from sessions import distil, first_cohort, metrics, prepared, taught, woken
from small_federations import three_kinds, training


def test_bounded_rows_equal_a_plain_loop() -> None:
    values = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 40)[:, None]
    clipped = clip_row_norms(values, 3.0)
    for row, result in zip(values.double(), clipped.double(), strict=True):
        norm = float(row.square().sum()) ** 0.5
        torch.testing.assert_close(result, row * 3.0 / norm if norm > 1.01 * 3.0 else row, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(clip_row_norms(clipped, 3.0), clipped)


def test_a_hundredth_more_and_no_rows_are_let_pass_bit_for_bit() -> None:
    rows = torch.tensor([[0.6, 0.8], [0.6, 0.8]]) * torch.tensor([[1.009], [1.02]])
    clipped = clip_row_norms(rows, 1.0)
    assert torch.equal(clipped[0], rows[0])
    assert float(clipped[1].norm()) == pytest.approx(1.0)
    for same in (torch.zeros(2, 3), torch.zeros(0, 3)):
        assert torch.equal(clip_row_norms(same, 1.0), same)


def test_representations_have_unit_norm_and_are_the_models(tmp_path: Path) -> None:
    client, public = woken(prepared(three_kinds(name="fedmd"), tmp_path), "paired-0"), PublicExchange()
    outputs = public.outputs(client)
    assert set(outputs) == {"image", "text"}
    assert public.names_for(client.info, ["text", "audio", "unpaired/image"]) == ("text", "unpaired/image")
    client.model.eval()
    batch = client.public_set.batch(torch.tensor([2, 5]))
    for name, values in outputs.items():
        torch.testing.assert_close(values.norm(dim=1), torch.ones(16))
        again = public.batch_outputs(client, client.model, batch, [name])[name]
        assert again.requires_grad
        torch.testing.assert_close(again, values[[2, 5]], atol=1e-6, rtol=1e-5)


def test_joint_distillation_trains_on_all_of_the_public_set(tmp_path: Path) -> None:
    """With ten of sixteen samples exchanged, the task still sees all and the targets fall on the right ones."""
    session = prepared(three_kinds(name="fedafd", task={"order": "joint"}, public={"samples": 10}), tmp_path)
    server = session.server
    seen: list[tuple[list[int], list[bool]]] = []
    inner = Distiller.distillation_loss

    def noted(self: Any, server: Any, public: Any, model: Any, batches: Any, targets: Any) -> Any:
        (batch,) = batches.values()
        target = targets["image"]
        for k in batch.index[target.valid[batch.index]].tolist():
            place = server.exchanged_index(10).tolist().index(k)
            torch.testing.assert_close(target.values[k], agreed["image"].values[place])
        seen.append((batch.index.tolist(), target.valid[batch.index].tolist()))
        return inner(self, server, public, model, batches, targets)

    agreed = taught(session)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distiller, "distillation_loss", noted)
        distil(session, agreed)
    index = [k for part, _ in seen for k in part]
    valid = {k: ok for part, flags in seen for k, ok in zip(part, flags, strict=True)}
    assert sorted(index) == list(range(16))
    assert [k for k in range(16) if valid[k]] == server.exchanged_index(10).tolist()


def test_a_joint_step_is_on_both_losses_of_one_encoding(tmp_path: Path) -> None:
    """Without dropout the weights are those of a loop that encodes a batch for each loss."""
    trained, encodings = [], 0

    def counted(module: nn.Module, *_: Any) -> None:
        nonlocal encodings
        encodings += module.training

    for by_hand in (False, True):
        session = prepared(three_kinds(name="creamfl", task={"order": "joint"}), tmp_path / str(by_hand))
        server, method = session.server, session.experiment.algorithm
        for module in server.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        rows, valid = F.normalize(torch.randn(16, 8, generator=generator(1)), dim=1), torch.arange(16) % 3 > 0
        targets = {"image": Ensembled(rows, valid), "text": Ensembled(rows.flip(0), valid)}
        if by_hand:
            for batches in method.public.part_passes(server, "distil", 1, 12, server.public_set, targets):
                apart = method.distiller.distillation_loss(server, method.public, server.model, batches, targets)
                server.trainer().step(server.task_loss(batches[""]) + apart)
        else:
            server.model.encoders["image"].register_forward_hook(counted)
            distil(session, targets)
        trained.append({name: value.detach().clone() for name, value in server.model.named_parameters()})
    assert encodings == 2, "sixteen samples are two batches"
    assert any("embedding" in name for name in trained[0])
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-4, atol=1e-6)


# ---- ensembles of aligned representations


Kind = Literal["procrustes", "ridge"]
KINDS: tuple[Kind | None, ...] = (None, "procrustes", "ridge")


def turned(values: Tensor, seed: int) -> Tensor:
    return values @ torch.linalg.qr(unit(values.shape[1], values.shape[1], seed=seed))[0]


def ensembles(folder: Path, known: Tensor, form: Kind | None) -> Ensembles:
    server = prepared(three_kinds(name="creamfl"), folder).server
    teacher = Teacher(weights=Mean(), alignment=Alignment(kind=form) if form else None)
    return Ensembles(teacher, PublicExchange(), server, Representations({"image": known}, order=""))


def test_turned_copies_of_the_server_average_to_it_once_they_are_aligned(tmp_path: Path) -> None:
    known = unit(200, 8, seed=0)
    lengths = dict[Kind | None, float]()
    for form in KINDS:
        folded = ensembles(tmp_path / f"{form}", known, form)
        for seed in range(1, 5):
            folded.add_weighed("image", f"{seed}", folded.clip_and_align({"image": turned(known, seed)})["image"], 0.0)
        mean = folded.targets()["image"].values
        lengths[form] = float(mean.norm(dim=1).mean())
        assert torch.allclose(mean, known, atol=0.03) == (form is not None)
    assert lengths[None] < 0.7 < lengths["procrustes"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("form", ["procrustes", "ridge"])
def test_one_huge_row_moves_the_others_little(tmp_path: Path, form: Kind) -> None:
    known = unit(200, 8, seed=0)
    folded, honest = ensembles(tmp_path, known, form), turned(known, 1)
    attack = honest.clone()
    attack[0] = -1e6 * turned(known, 2)[0]
    expected, actual = (folded.clip_and_align({"image": rows})["image"] for rows in (honest, attack))
    assert float((expected - actual)[1:].norm(dim=1).max()) < 0.05
    assert float(actual.norm(dim=1).max()) < 1.001


def test_similarity_brings_what_is_alike_nearer_in_no_common_space(tmp_path: Path) -> None:
    config = three_kinds(name="creamfl", distiller={"loss": "similarity", "epochs": 80}, task=None)
    config["server"]["training"] = training("adamp", 0.01, 16)
    session = prepared(config, tmp_path)
    values = unit(len(session.server.public_set), 8, seed=1)
    clients = {f"{seed}": Rows(turned(values, seed), torch.zeros(len(values))) for seed in (2, 3)}
    valid = torch.ones(len(values), dtype=torch.bool)
    mean = torch.stack([rows.values for rows in clients.values()]).mean(0)
    with isolated(0):  # as rounds do: the server's dropout draws from torch's global generator
        distil(session, dict.fromkeys(("image", "text"), Ensembled(mean, valid, clients)))
    recorded = metrics(session)
    for modality in ("image", "text"):
        assert recorded[f"kd_similarity_after.{modality}"] < 0.8 * recorded[f"kd_similarity_before.{modality}"]
        assert f"kd_distance_after.{modality}" in recorded


@pytest.mark.parametrize("loss", ["l2", "similarity"])
def test_a_server_that_stands_still_is_as_far_from_its_targets_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Jointly with the task the passes are over all of P, and the targets of ten samples are spread over it."""
    session = prepared(
        three_kinds(name="creamfl", distiller={"loss": loss}, task={"order": "joint"}, public={"samples": 10}), tmp_path
    )
    monkeypatch.setattr(PublicExchange, "passes", lambda *_: iter(()))
    session.experiment.algorithm.round(session.server, first_cohort(session))
    recorded = metrics(session)
    before = {key: value for key, value in recorded.items() if key.startswith("kd_") and "_before" in key}
    assert len(before) == (4 if loss == "similarity" else 2)
    for key, value in before.items():
        assert recorded[key.replace("before", "after")] == pytest.approx(value, abs=1e-5)


# ---- private and public batches together, and references


def batch(number: int) -> Batch:
    index = torch.tensor([number])
    return Batch({"image": torch.full((1, 2), float(number))}, {}, index, index)


def batches() -> Iterator[Batch]:
    return (batch(number) for number in count())


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("wanted", [None, 1, 2, 3, 5, 20])
def test_every_private_batch_once_and_public_ones_spread_evenly(steps: int, wanted: int | None) -> None:
    pairs = list(interleave((batch(k) for k in range(steps)), batches(), steps, wanted))
    private = [int(own.index) for own, _ in pairs if own is not None]
    public = [int(other.index) for _, other in pairs if other is not None]
    total = wanted or steps
    assert private == list(range(steps))
    assert public == list(range(total))
    seen = 0
    for position, (own, other) in enumerate(pairs):
        seen += other is not None
        last_of_step = position + 1 == len(pairs) or pairs[position + 1][0] is not None
        if (
            last_of_step
        ):  # after k of s private batches at least k/s of the public ones are done, and fewer than one more
            assert 0 <= seen - total * sum(own is not None for own, _ in pairs[: position + 1]) / steps < 1


def test_no_private_batch_means_no_step() -> None:
    assert list(interleave(iter(()), batches(), 0)) == []


def test_stored_references_are_looked_up_by_index() -> None:
    assert Stored({"image": torch.arange(8.0).view(4, 2)})("image", batch(2)).tolist() == [[4.0, 5.0]]


def test_a_frozen_copy_stays_as_it_was() -> None:
    model = Model({"image": nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))}, {}, 3).train()
    reference = FrozenCopy(model)
    before = reference("image", batch(1))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)
    after = reference("image", batch(1))
    assert torch.equal(before, after)  # neither moved nor dropped out
    assert not after.requires_grad
    assert model.training


def test_remembered_references_encode_each_distinct_input_once_and_stay_as_they_were() -> None:
    encoded: list[int] = []
    model = Model({"image": nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))}, {}, 3).train()
    positions, inputs = torch.tensor([0, 0, 1, 2, 2]), torch.randn(3, 2)
    expected = FrozenCopy(model)("image", Batch({"image": inputs}, {}, torch.arange(3), torch.arange(3)))
    model.encoders["image"].register_forward_pre_hook(lambda _, given: encoded.append(len(given[0])))
    reference = Remembered(model, {"image": positions})
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)
    for index in (torch.tensor([4, 0]), torch.tensor([1, 3]), torch.tensor([2, 0, 4])):
        asked = Batch({"image": inputs[positions[index]]}, {}, index, index)
        torch.testing.assert_close(reference("image", asked), expected[positions[index]])
    assert encoded == [2, 1]
