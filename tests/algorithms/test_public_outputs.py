"""Outputs on public samples: bounds, representations and scores, who has which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polyfed.algorithms.shared.public_exchange import EitherExchange, PublicExchange, clip_row_norms
from polyfed.core.errors import ConfigError
from polyfed.federation.client import ClientInfo
from polyfed.wire.payload import Logits, Representations
from sessions import prepared, woken
from small_federations import one_classification, three_kinds

IMAGE = ClientInfo("a", "a", ("image",), "classification", 10, 5, "x")
PAIRED = ClientInfo("b", "b", ("image", "text"), "retrieval", 10, 5, "y")
REPRESENTATIONS, SCORES = PublicExchange(), EitherExchange(form="scores")


def test_bounded_rows_equal_a_plain_loop() -> None:
    stream = torch.Generator().manual_seed(0)
    values = torch.randn(40, 5, generator=stream) * torch.logspace(-2, 2, 40)[:, None]
    clipped = clip_row_norms(values, 3.0)
    for row, result in zip(values.double(), clipped.double(), strict=True):
        norm = float(row.square().sum()) ** 0.5
        expected = row * 3.0 / norm if norm > 1.01 * 3.0 else row
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(clip_row_norms(clipped, 3.0), clipped)


def test_a_hundredth_more_and_no_rows_are_let_pass_bit_for_bit() -> None:
    rows = torch.tensor([[0.6, 0.8], [0.6, 0.8]]) * torch.tensor([[1.009], [1.02]])
    clipped = clip_row_norms(rows, 1.0)
    assert torch.equal(clipped[0], rows[0])
    assert float(clipped[1].norm()) == pytest.approx(1.0)
    for same in (torch.zeros(2, 3), torch.zeros(0, 3)):
        assert torch.equal(clip_row_norms(same, 1.0), same)


def test_representations_have_unit_norm_and_are_the_models(tmp_path: Path) -> None:
    client = woken(prepared(three_kinds(name="fedmd"), tmp_path), "paired-0")
    outputs = REPRESENTATIONS.outputs(client)
    assert set(outputs) == {"image", "text"}
    client.model.eval()
    batch = client.public_set.batch(torch.tensor([2, 5]))
    for name, values in outputs.items():
        torch.testing.assert_close(values.norm(dim=1), torch.ones(16))
        again = REPRESENTATIONS.batch_outputs(client, client.model, batch, [name])[name]
        assert again.requires_grad
        torch.testing.assert_close(again, values[[2, 5]], atol=1e-6, rtol=1e-5)
    with pytest.raises(ConfigError, match="the task of 'paired-0' is 'retrieval'; give it a classification"):
        SCORES.outputs(client)


@pytest.mark.parametrize("name", ["image", "text", "paired-0"])
def test_scores_are_the_centred_logits(tmp_path: Path, name: str) -> None:
    client = woken(prepared(one_classification(three_kinds(name="fedmd", public={"form": "scores"})), tmp_path), name)
    client.setup = replace(client.setup, evaluation_batch=5)  # 16 samples in four batches
    client.model.train()
    outputs = SCORES.outputs(client)
    assert client.model.training
    assert not outputs["label"].requires_grad
    client.model.eval()
    for k in range(16):
        inputs = client.public_set.batch(torch.tensor([k])).inputs
        embedding = torch.stack([client.model.embed(key, x) for key, x in inputs.items()]).mean(0)
        logits = client.head(embedding)[0].detach()
        torch.testing.assert_close(outputs["label"][k], logits - logits.mean(), atol=1e-6, rtol=1e-5)
    batch = client.public_set.batch(torch.tensor([3, 0]))
    out = SCORES.batch_outputs(client, client.model, batch, ["label"])["label"]
    assert out.requires_grad
    torch.testing.assert_close(out, outputs["label"][[3, 0]], atol=1e-6, rtol=1e-5)
    samples, bare = client.public_set, SimpleNamespace(targets={})
    assert torch.equal(SCORES.labels(client, samples), samples.targets["label"].long())
    assert SCORES.labels(client, bare) is REPRESENTATIONS.labels(client, samples) is None  # type: ignore[arg-type]


def test_each_form_has_its_names_anchors_and_payload() -> None:
    known = Representations({"image": torch.ones(2, 2)}, order="x")
    assert REPRESENTATIONS.names_for(PAIRED, ["text"]) == ("text",)
    assert REPRESENTATIONS.names_for(IMAGE, ["text"]) == ()
    assert SCORES.names_for(IMAGE, ["label"]) == ("label",)
    assert EitherExchange().anchors(known, "image") is known["image"]
    assert SCORES.anchors(known, "image") is None
    assert type(REPRESENTATIONS.bundle(known, "x")) is Representations
    scores = SCORES.bundle(known, "x")
    assert type(scores) is Logits
    assert scores.order == "x"
