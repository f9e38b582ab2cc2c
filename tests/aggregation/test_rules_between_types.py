"""Coefficients of collaboration for every combination of present and absent types, and what cannot collaborate."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from polyfed.aggregation.averaging import Averaging, GlobalModel
from polyfed.aggregation.averagings.low_rank import Separate, SingularValues
from polyfed.aggregation.averagings.tensors import ByName, BySlot, Rule
from polyfed.core.errors import ConfigError
from polyfed.models.slots import Slot, TensorPlace

FEDCOLA = BySlot(layers="attention", compensation=True)
CA_ONLY = BySlot(layers="attention")
DEFAULT = {"image": 12_500.0, "text": 30_000.0, "paired": 12_500.0}
SHAPE = (4, 4)


def global_model(*modalities: str, head: str) -> GlobalModel:
    roles = ("embedding", "attention", "mlp", "norm", "projection")
    found = {f"{m}.{role}": TensorPlace(Slot(m, role), f"{role}.weight") for m in modalities for role in roles}
    if len(modalities) > 1:
        found["shared"] = TensorPlace(Slot("+".join(modalities), "final_norm"), "weight")
    found["head"] = TensorPlace(Slot(head, "head"), "weight")
    return GlobalModel(dict.fromkeys(found, torch.zeros(SHAPE)), found, modalities, (f"{head}-0", f"{head}-1"))


MODELS = {
    "image": global_model("image", head="cifar"),
    "text": global_model("text", head="news"),
    "paired": global_model("image", "text", head="flickr"),
}


def shares(rule: Rule, kind: str, modality: str, role: str) -> dict[str, float]:
    """Type -> coefficient of a slot."""
    return {share.source: share.coefficient for share in rule[kind, Slot(modality, role)]}


def test_the_default_round_has_the_papers_coefficients() -> None:
    rule = FEDCOLA.rule(MODELS, DEFAULT)
    assert shares(rule, "image", "image", "attention") == pytest.approx({"image": 0.5, "paired": 0.5})
    assert shares(rule, "image", "image", "mlp") == pytest.approx({"image": 0.5})
    assert shares(rule, "image", "cifar", "head") == pytest.approx({"image": 0.5})
    assert shares(rule, "paired", "image", "attention") == pytest.approx({"image": 0.2273, "paired": 0.2273}, abs=5e-5)
    assert shares(rule, "paired", "text", "attention") == pytest.approx({"text": 0.5455, "paired": 0.2273}, abs=5e-5)
    for modality, role in (("image", "mlp"), ("text", "embedding"), ("image+text", "final_norm"), ("flickr", "head")):
        assert shares(rule, "paired", modality, role) == pytest.approx({"paired": 0.2273}, abs=5e-5)
    assert shares(rule, "text", "text", "attention") == pytest.approx({"text": 0.7059, "paired": 0.2941}, abs=5e-5)
    assert shares(rule, "text", "text", "norm") == pytest.approx({"text": 0.7059}, abs=5e-5)


def test_the_released_denominator_counts_types_that_have_no_such_stack() -> None:
    released = BySlot(layers="attention", denominator="model")
    rule = released.rule(MODELS, DEFAULT)
    assert shares(rule, "paired", "image", "attention") == pytest.approx({"image": 12.5 / 55, "paired": 12.5 / 55})
    assert shares(rule, "paired", "image", "mlp") == {"paired": 1.0}
    assert shares(rule, "image", "image", "attention") == pytest.approx({"image": 0.5, "paired": 0.5})


@pytest.mark.parametrize("present", list(product([False, True], repeat=3)))
@pytest.mark.parametrize("compensation", [False, True])
def test_every_combination_of_present_types(present: tuple[bool, ...], compensation: bool) -> None:
    n = {kind: DEFAULT[kind] * here for kind, here in zip(DEFAULT, present, strict=True)}
    v, t, p = n["image"], n["text"], n["paired"]
    rule = BySlot(layers="attention", compensation=compensation).rule(MODELS, n)
    whole = {"image": v + p, "text": t + p, "paired": v + t + p}
    own = {("image", "image"): v + p, ("paired", "image"): v + p, ("text", "text"): t + p, ("paired", "text"): t + p}
    for (kind, slot), found in rule.items():
        if slot.role == "attention":
            total = whole[kind] if compensation else own[kind, slot.modality]
            expected = {"image": v, "paired": p} if slot.modality == "image" else {"text": t, "paired": p}
        else:
            total, expected = (whole[kind] if compensation else n[kind]), {kind: n[kind]}
        wanted = {name: size / total for name, size in expected.items() if size}
        assert {share.source: share.coefficient for share in found} == pytest.approx(wanted), (kind, slot)


@pytest.mark.parametrize("reach", ["modality", "all"])
@pytest.mark.parametrize("layers", ["attention", "mlp", "mlp_norm", "blocks", "encoder"])
def test_shares_of_the_scope_grid_add_up_to_one(layers: str, reach: str) -> None:
    if (layers, reach) == ("encoder", "all"):
        return  # embeddings of two modalities are not of one kind; the error is tested below
    averaging = BySlot(layers=layers, range=reach)
    rule = averaging.rule(MODELS, DEFAULT)
    every = ["attention", "mlp", "norm", "embedding", "projection"]
    covered = {"mlp_norm": every[1:3], "blocks": every[:3], "encoder": every}.get(layers, [layers])
    for (kind, slot), found in rule.items():
        assert sum(share.coefficient for share in found) == pytest.approx(1.0)
        assert ({share.source for share in found} != {kind}) == (slot.role in covered)
    if reach == "all":
        role = covered[0]
        found = rule["image", Slot("image", role)]
        assert len(found) == 4  # the image stack, the text stack, and the paired clients' two, which share one weight
        assert shares(rule, "image", "image", role)["text"] == pytest.approx(30 / 55)


def test_fediot_multiplies_the_samples_of_paired_clients() -> None:
    rule = BySlot(layers="blocks", factor=100.0).rule(MODELS, DEFAULT)
    for role in ("attention", "mlp", "norm"):
        assert shares(rule, "image", "image", role) == pytest.approx({"image": 1 / 101, "paired": 100 / 101})
    assert shares(rule, "image", "image", "embedding") == {"image": 1.0}


def test_what_the_released_name_blocks_matches_leaves_attention_out() -> None:
    rule = BySlot(layers="mlp_norm").rule(MODELS, DEFAULT)
    assert set(shares(rule, "image", "image", "attention")) == {"image"}
    assert set(shares(rule, "image", "image", "mlp")) == {"image", "paired"}


def test_more_data_sets_of_a_modality_contribute_each() -> None:
    more = MODELS | {"organs": global_model("image", head="organs")}
    sizes = DEFAULT | {"organs": 5_000.0}
    rule = FEDCOLA.rule(more, sizes)
    assert shares(rule, "organs", "image", "attention") == pytest.approx(
        {"image": 12.5 / 30, "organs": 5 / 30, "paired": 12.5 / 30}
    )
    assert shares(rule, "organs", "organs", "head") == pytest.approx({"organs": 5 / 30})
    assert shares(rule, "paired", "image", "mlp") == pytest.approx({"paired": 12.5 / 60})


def test_a_third_modality_needs_nothing_new() -> None:
    more = {
        "sound": global_model("audio", head="calls"),
        "video": global_model("audio", "image", head="clips"),
    } | MODELS
    rule = FEDCOLA.rule(more, DEFAULT | {"sound": 10_000.0, "video": 10_000.0})
    assert shares(rule, "sound", "audio", "attention") == {"sound": 0.5, "video": 0.5}
    assert set(shares(rule, "paired", "image", "attention")) == {"image", "paired", "video"}
    assert shares(rule, "text", "text", "attention") == pytest.approx({"text": 30 / 42.5, "paired": 12.5 / 42.5})


def test_slots_that_differ_are_named_with_their_clients() -> None:
    paired = MODELS["paired"]
    odd = MODELS | {"paired": replace(paired, weights={**paired.weights, "image.attention": torch.zeros(8, 4)})}
    BySlot(layers="mlp").require(odd)
    message = (
        r"slot 'image/attention' of clients cifar-0, cifar-1 cannot be averaged with slot 'image/attention' of clients "
        r"flickr-0, flickr-1: 'attention.weight' is \[4, 4\] and \[8, 4\]"
    )
    with pytest.raises(ConfigError, match=message):
        CA_ONLY.require(odd)


def behind(model: GlobalModel, **digests: str) -> GlobalModel:
    """The model with something frozen in its encoders."""
    places = {
        name: replace(place, frozen=tuple(one for one in digests.items() if one[0] in place.slot.modality))
        for name, place in model.places.items()
    }
    return replace(model, places=places)


@pytest.mark.parametrize("rule", [BySlot(), CA_ONLY, ByName(), Separate()])
def test_layers_behind_other_frozen_values_are_not_averaged(rule: Averaging) -> None:
    factors = {"image.q.lora_A.default.weight": torch.zeros(2, 5), "image.q.lora_B.default.weight": torch.zeros(6, 2)}

    def with_factors(model: GlobalModel) -> GlobalModel:
        place = TensorPlace(Slot("image", "attention"), "q", model.places["image.attention"].frozen)
        return replace(model, places=model.places | dict.fromkeys(factors, place), weights={**model.weights, **factors})

    image, paired = MODELS["image"], MODELS["paired"]
    for digests in ({}, {"image": "9xaa"}, {"text": "9xbb"}, {"image": "9xaa", "text": "9xbb"}):
        rule.require({"a": with_factors(behind(image, image="9xaa")), "b": with_factors(behind(paired, **digests))})
    message = "cifar-0, cifar-1.* flickr-0, flickr-1|flickr-0, flickr-1.* cifar-0, cifar-1"
    with pytest.raises(ConfigError, match=rf"({message}).* frozen in their 'image' encoders is not the same \(9x"):
        rule.require({"a": with_factors(behind(image, image="9xaa")), "b": with_factors(behind(paired, image="9xcc"))})


def test_factors_of_all_ranks_need_one_frozen_network_and_tensors_of_other_shapes_do_not() -> None:
    def model(rank: int, width: int, digest: str) -> GlobalModel:
        weights = {
            "q.lora_A.default.weight": torch.zeros(rank, width),
            "q.lora_B.default.weight": torch.zeros(width, rank),
        }
        place = TensorPlace(Slot("image", "trunk"), "q", (("image", digest),))
        return GlobalModel(weights, dict.fromkeys(weights, place), ("image",), (f"rank-{rank}",))

    with pytest.raises(ConfigError, match=r"clients rank-1 cannot .* of clients rank-3: .* \(9xbb and 9xaa\)"):
        SingularValues().require({"a": model(3, 4, "9xaa"), "b": model(1, 4, "9xbb")})
    SingularValues().require({"a": model(3, 4, "9xaa"), "b": model(1, 5, "9xbb")})
    ByName().require({"a": model(3, 4, "9xaa"), "b": model(1, 4, "9xbb")})


def test_layers_that_nobody_has_are_an_error() -> None:
    bare = {
        "image": GlobalModel(
            {"w": torch.zeros(SHAPE)}, {"w": TensorPlace(Slot("image", "trunk"), "w")}, ("image",), ("a",)
        )
    }
    with pytest.raises(ConfigError, match="no client's model has such layers; roles there are: trunk"):
        CA_ONLY.require(bare)
