"""What participants say of public samples: bounds, both forms, who has which channel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polyfed.core.errors import ConfigError
from polyfed.federation.client import ClientInfo
from polyfed.federation.public_outputs import LogitKind, RepresentationKind, clip_row_norms
from polyfed.wire.payload import Logits, Representations
from sessions import prepared, woken
from small_federations import one_classification, three_kinds

IMAGE = ClientInfo("a", "a", ("image",), "classification", 10, "x")
PAIRED = ClientInfo("b", "b", ("image", "text"), "retrieval", 10, "y")


# ---- bounds


def test_bounded_rows_equal_a_plain_loop() -> None:
    stream = torch.Generator().manual_seed(0)
    values = torch.randn(40, 5, generator=stream) * torch.logspace(-2, 2, 40)[:, None]
    found = clip_row_norms(values, 3.0)
    for row, result in zip(values.double(), found.double(), strict=True):
        norm = float(row.square().sum()) ** 0.5
        expected = row * 3.0 / norm if norm > 1.01 * 3.0 else row
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)


def test_a_hundredth_more_is_let_pass_bit_for_bit() -> None:
    rows = torch.tensor([[0.6, 0.8], [0.6, 0.8]]) * torch.tensor([[1.009], [1.02]])
    found = clip_row_norms(rows, 1.0)
    assert torch.equal(found[0], rows[0])
    assert float(found[1].norm()) == pytest.approx(1.0)


def test_zero_rows_and_no_rows_stay() -> None:
    assert torch.equal(clip_row_norms(torch.zeros(2, 3), 1.0), torch.zeros(2, 3))
    assert clip_row_norms(torch.zeros(0, 3), 1.0).shape == (0, 3)


def test_bounding_keeps_directions_and_is_idempotent() -> None:
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)) * 10
    once = clip_row_norms(rows, 1.0)
    torch.testing.assert_close(clip_row_norms(once, 1.0), once)
    torch.testing.assert_close(once / once.norm(dim=1, keepdim=True), rows / rows.norm(dim=1, keepdim=True))


# ---- forms


def test_representations_have_unit_norm_and_are_the_models(tmp_path: Path) -> None:
    client = woken(prepared(three_kinds(name="fedmd"), tmp_path), "paired-0")
    found = RepresentationKind().of(client, client.public_set)
    assert set(found) == {"image", "text"}
    client.model.eval()
    batch = client.public_set.batch(torch.tensor([2, 5]))
    for name, values in found.items():
        torch.testing.assert_close(values.norm(dim=1), torch.ones(16))
        again = RepresentationKind().outputs(client, client.model, batch, [name])[name]
        assert again.requires_grad
        torch.testing.assert_close(again, values[[2, 5]], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["image", "text", "paired-0"])
def test_scores_are_the_centred_logits(tmp_path: Path, name: str) -> None:
    client = woken(prepared(one_classification(three_kinds(name="fedmd", public={"form": "scores"})), tmp_path), name)
    client.evaluation_batch = 5  # 16 samples in four batches
    client.model.train()
    found = LogitKind().of(client, client.public_set)
    assert client.model.training
    assert not found["label"].requires_grad
    client.model.eval()
    for k in range(16):
        inputs = client.public_set.batch(torch.tensor([k])).inputs
        embedding = torch.stack([client.model.embed(key, x) for key, x in inputs.items()]).mean(0)
        logits = client.head(embedding)[0].detach()
        torch.testing.assert_close(found["label"][k], logits - logits.mean(), atol=1e-6, rtol=1e-5)
    batch = client.public_set.batch(torch.tensor([3, 0]))
    out = LogitKind().outputs(client, client.model, batch, ["label"])["label"]
    assert out.requires_grad
    torch.testing.assert_close(out, found["label"][[3, 0]], atol=1e-6, rtol=1e-5)


def test_forms_know_their_channels_labels_and_anchors(tmp_path: Path) -> None:
    client = woken(
        prepared(one_classification(three_kinds(name="fedmd", public={"form": "scores"})), tmp_path), "paired-0"
    )
    samples, known = client.public_set, {"image": torch.ones(2, 2)}
    assert RepresentationKind().channels(PAIRED, ["text"]) == ("text",)
    assert RepresentationKind().channels(IMAGE, ["text"]) == ()
    assert LogitKind().channels(IMAGE, ["label"]) == ("label",)
    assert RepresentationKind().labels(client, samples) is None
    assert torch.equal(LogitKind().labels(client, samples), samples.targets["label"].long())
    bare = SimpleNamespace(targets={})
    assert LogitKind().labels(client, bare) is None  # type: ignore[arg-type]
    assert RepresentationKind().anchors(known) is known
    assert LogitKind().anchors(known) == {}


def test_artefacts_are_of_the_forms_kind() -> None:
    values = {"a": torch.ones(2, 3)}
    assert isinstance(RepresentationKind().bundle(values, "x"), Representations)
    scores = LogitKind().bundle(values, "x")
    assert isinstance(scores, Logits)
    assert scores.order == "x"


def test_scores_of_another_task_are_refused(tmp_path: Path) -> None:
    client = woken(prepared(three_kinds(name="fedmd"), tmp_path), "paired-0")
    with pytest.raises(ConfigError, match="the task of 'paired-0' is 'retrieval'; give it a classification"):
        LogitKind().of(client, client.public_set)
