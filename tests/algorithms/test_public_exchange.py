"""Methods over a public set: bounded rows, representations, and joint distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.shared.distiller import Distiller
from polyfed.algorithms.shared.public_exchange import PublicExchange, clip_row_norms
from polyfed.core.randomness import generator
from sessions import distil, prepared, taught, woken
from small_federations import three_kinds


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
