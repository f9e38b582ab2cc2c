"""Averagings of tensors and of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from naive import averaged, global_models
from polyfed.aggregation.averaging import Averages, Averaging, GlobalModel
from polyfed.aggregation.averagings import low_rank
from polyfed.aggregation.averagings.low_rank import Separate, SingularValues
from polyfed.aggregation.averagings.tensors import ByName, BySlot, ByType, Rule
from polyfed.core.errors import ConfigError
from polyfed.models.slots import Slot, TensorSlot

ROLES = ("attention", "mlp")


def global_model(*modalities: str) -> GlobalModel:
    slots = {f"{m}.{role}": TensorSlot(Slot(m, role), role) for m in modalities for role in ROLES}
    slots["count"] = TensorSlot(Slot("+".join(modalities), "head"), "count")
    return GlobalModel({name: torch.zeros(() if name == "count" else (3,)) for name in slots}, slots, modalities)


MODELS = {"image": global_model("image"), "text": global_model("text"), "paired": global_model("image", "text")}
Model = dict[str, Tensor]


def model(group: str, stream: torch.Generator) -> Model:
    return {
        name: torch.randint(0, 9, (), generator=stream) if name == "count" else torch.randn(3, generator=stream)
        for name in MODELS[group].slots
    }


def federation(seed: int = 0) -> tuple[dict[str, Model], list[tuple[str, Model, int]]]:
    stream = torch.Generator().manual_seed(seed)
    start = {group: model(group, stream) for group in MODELS}
    kinds = ["image", "image", "text", "paired", "paired", "paired"]
    return start, [(group, model(group, stream), 10 * k + 5) for k, group in enumerate(kinds)]


def models_of(start: dict[str, Model]) -> dict[str, GlobalModel]:
    return {group: replace(MODELS[group], weights=weights) for group, weights in start.items()}


def exact(averaging: Averaging, start: dict[str, Model], clients: Iterable[tuple[str, Model, int]]) -> Averages:
    return averaged(averaging, models_of(start), clients)


def naive(start: dict[str, Model], clients: list[tuple[str, Model, int]], averaging: ByType) -> dict[str, Model]:
    """W + sum over clients of coefficient x n_k / n_type x (W_k - W), in float64, client by client."""
    sizes = {group: float(sum(n for other, _, n in clients if other == group)) for group in start}
    rule = averaging.rule(MODELS, sizes)
    result = {group: {name: value.double() for name, value in weights.items()} for group, weights in start.items()}
    for group, held in MODELS.items():
        for name, place in held.slots.items():
            for share in rule[group, place.slot]:
                source = MODELS[share.source].keys[share.slot][place.key]
                for other, weights, n in clients:
                    if other == share.source:
                        part = share.coefficient * n / sizes[other]
                        result[group][name] += part * (weights[source].double() - start[other][source].double())
    return result


def own_count(clients: list[tuple[str, Model, int]], group: str) -> Tensor:
    """Counters are the rounded mean of the type's own."""
    own = [(weights["count"].double(), n) for other, weights, n in clients if other == group]
    return (sum(value * n for value, n in own) / sum(n for _, n in own)).round()


@pytest.mark.parametrize(
    "averaging",
    [
        ByType(),
        BySlot(layers="attention"),
        BySlot(layers="attention", compensation=True),
        BySlot(layers="blocks", factor=100.0),
        BySlot(layers="blocks", range="all"),
        BySlot(layers="attention", denominator="model"),
    ],
)
def test_exact_equals_the_naive_sum_in_any_order(averaging: ByType) -> None:
    start, clients = federation()
    before = {group: {name: value.clone() for name, value in weights.items()} for group, weights in start.items()}
    expected = naive(start, clients, averaging)
    for order in (clients, clients[::-1]):
        result = exact(averaging, start, order)
        for group, weights in expected.items():
            for name, value in weights.items():
                wanted = own_count(clients, group) if name == "count" else value
                assert result[group][name].dtype == start[group][name].dtype
                assert torch.allclose(result[group][name].double(), wanted, atol=1e-6), (group, name)
    assert all(torch.equal(start[group][name], before[group][name]) for group in start for name in start[group])


def test_absent_types_stay_or_follow_the_others() -> None:
    start, clients = federation()
    paired = (client for client in clients if client[0] == "paired")
    result = exact(BySlot(layers="attention", compensation=True), start, paired)
    assert torch.equal(result["image"]["image.mlp"], start["image"]["image.mlp"])
    update = result["paired"]["image.attention"] - start["paired"]["image.attention"]
    assert torch.allclose(result["image"]["image.attention"] - start["image"]["image.attention"], update, atol=1e-6)


def test_no_client_at_all_leaves_everything() -> None:
    start, _ = federation()
    result = exact(BySlot(layers="attention", compensation=True), start, ())
    assert all(torch.equal(result[group][name], start[group][name]) for group in start for name in start[group])


def test_sequential_interpolation_keeps_a_share_of_the_old_model() -> None:
    """Three equal clients count 0.148, 0.222 and 0.333, and 0.296 of the old model survives (methods, 0.5)."""
    shares = []
    for k in range(-1, 3):
        old, *clients = (filled(float(one == k)) for one in range(-1, 3))
        sent = [("image", own, 10) for own in clients]
        result = averaged(ByType(mean="sequential"), models_of({"image": old}), sent, {"image": 30.0})
        shares.append(float(result["image"]["image.attention"]))
    assert shares == pytest.approx([0.296, 0.148, 0.222, 0.333], abs=5e-4)
    assert sum(shares) == pytest.approx(1.0)


def filled(value: float) -> Model:
    vectors = {f"image.{role}": torch.full((1,), value, dtype=torch.float64) for role in ROLES}
    return vectors | {"count": torch.tensor(int(value))}


def test_sequential_equals_a_naive_loop_and_depends_on_the_order() -> None:
    start, clients = federation()
    averaging = BySlot(layers="attention", compensation=True, mean="sequential")
    sizes = {group: float(sum(n for other, _, n in clients if other == group)) for group in start}
    rule = averaging.rule(MODELS, sizes)

    def loop(order: list[tuple[str, Model, int]]) -> dict[str, Model]:
        running = {group: {name: value.double() for name, value in model.items()} for group, model in start.items()}
        for group, weights, n in order:
            for target, held in MODELS.items():
                for name, place in held.slots.items():
                    for share in (share for share in rule[target, place.slot] if share.source == group):
                        towards = weights[MODELS[group].keys[share.slot][place.key]].double()
                        running[target][name] += (
                            share.coefficient * n / sizes[group] * (towards - running[target][name])
                        )
        return running

    def streamed(order: list[tuple[str, Model, int]]) -> dict[str, Model]:
        return averaged(averaging, models_of(start), order, sizes)

    result, expected = streamed(clients), loop(clients)
    for group, weights in result.items():
        for name in (name for name in weights if name != "count"):
            assert torch.allclose(weights[name].double(), expected[group][name], atol=1e-6)
    assert not torch.allclose(result["paired"]["image.mlp"], streamed(clients[::-1])["paired"]["image.mlp"])


# ---- rules between types


FEDCOLA = BySlot(layers="attention", compensation=True)
CA_ONLY = BySlot(layers="attention")
DEFAULT = {"image": 12_500.0, "text": 30_000.0, "paired": 12_500.0}
SHAPE = (4, 4)


def type_with_head(*modalities: str, head: str) -> GlobalModel:
    roles = ("embedding", "attention", "mlp", "norm", "projection")
    result = {f"{m}.{role}": TensorSlot(Slot(m, role), f"{role}.weight") for m in modalities for role in roles}
    if len(modalities) > 1:
        result["shared"] = TensorSlot(Slot("+".join(modalities), "final_norm"), "weight")
    result["head"] = TensorSlot(Slot(head, "head"), "weight")
    return GlobalModel(dict.fromkeys(result, torch.zeros(SHAPE)), result, modalities, (f"{head}-0", f"{head}-1"))


TYPES = {
    "image": type_with_head("image", head="cifar"),
    "text": type_with_head("text", head="news"),
    "paired": type_with_head("image", "text", head="flickr"),
}


def shares(rule: Rule, group: str, modality: str, role: str) -> dict[str, float]:
    """Type -> coefficient of a slot."""
    return {share.source: share.coefficient for share in rule[group, Slot(modality, role)]}


def test_the_default_round_has_the_papers_coefficients() -> None:
    rule = FEDCOLA.rule(TYPES, DEFAULT)
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
    rule = BySlot(layers="attention", denominator="model").rule(TYPES, DEFAULT)
    assert shares(rule, "paired", "image", "attention") == pytest.approx({"image": 12.5 / 55, "paired": 12.5 / 55})
    assert shares(rule, "paired", "image", "mlp") == {"paired": 1.0}
    assert shares(rule, "image", "image", "attention") == pytest.approx({"image": 0.5, "paired": 0.5})


@pytest.mark.parametrize("present", list(product([False, True], repeat=3)))
@pytest.mark.parametrize("compensation", [False, True])
def test_every_combination_of_present_types(present: tuple[bool, ...], compensation: bool) -> None:
    n = {group: DEFAULT[group] * here for group, here in zip(DEFAULT, present, strict=True)}
    v, t, p = n["image"], n["text"], n["paired"]
    rule = BySlot(layers="attention", compensation=compensation).rule(TYPES, n)
    full = {"image": v + p, "text": t + p, "paired": v + t + p}
    own = {("image", "image"): v + p, ("paired", "image"): v + p, ("text", "text"): t + p, ("paired", "text"): t + p}
    for (group, slot), result in rule.items():
        if slot.role == "attention":
            total = full[group] if compensation else own[group, slot.modality]
            expected = {"image": v, "paired": p} if slot.modality == "image" else {"text": t, "paired": p}
        else:
            total, expected = (full[group] if compensation else n[group]), {group: n[group]}
        wanted = {name: size / total for name, size in expected.items() if size}
        assert {share.source: share.coefficient for share in result} == pytest.approx(wanted), (group, slot)


@pytest.mark.parametrize("reach", ["modality", "all"])
@pytest.mark.parametrize("layers", ["attention", "mlp", "mlp_norm", "blocks", "encoder"])
def test_shares_of_the_scope_grid_add_up_to_one(layers: str, reach: str) -> None:
    if (layers, reach) == ("encoder", "all"):
        return  # embeddings of two modalities are not of one kind; the error is tested below
    rule = BySlot(layers=layers, range=reach).rule(TYPES, DEFAULT)
    every = ["attention", "mlp", "norm", "embedding", "projection"]
    covered = {"mlp_norm": every[1:3], "blocks": every[:3], "encoder": every}.get(layers, [layers])
    for (group, slot), result in rule.items():
        assert sum(share.coefficient for share in result) == pytest.approx(1.0)
        assert ({share.source for share in result} != {group}) == (slot.role in covered)
    if reach == "all":
        role = covered[0]
        result = rule["image", Slot("image", role)]
        assert len(result) == 4  # the image stack, the text stack, and the paired clients' two, which share one weight
        assert shares(rule, "image", "image", role)["text"] == pytest.approx(30 / 55)


def test_more_data_sets_of_a_modality_contribute_each() -> None:
    rule = FEDCOLA.rule(TYPES | {"organs": type_with_head("image", head="organs")}, DEFAULT | {"organs": 5_000.0})
    assert shares(rule, "organs", "image", "attention") == pytest.approx(
        {"image": 12.5 / 30, "organs": 5 / 30, "paired": 12.5 / 30}
    )
    assert shares(rule, "organs", "organs", "head") == pytest.approx({"organs": 5 / 30})
    assert shares(rule, "paired", "image", "mlp") == pytest.approx({"paired": 12.5 / 60})


def test_a_third_modality_needs_nothing_new() -> None:
    video = type_with_head("audio", "image", head="clips")
    more = {"sound": type_with_head("audio", head="calls"), "video": video} | TYPES
    rule = FEDCOLA.rule(more, DEFAULT | {"sound": 10_000.0, "video": 10_000.0})
    assert shares(rule, "sound", "audio", "attention") == {"sound": 0.5, "video": 0.5}
    assert set(shares(rule, "paired", "image", "attention")) == {"image", "paired", "video"}
    assert shares(rule, "text", "text", "attention") == pytest.approx({"text": 30 / 42.5, "paired": 12.5 / 42.5})


def test_slots_that_differ_are_named_with_their_clients() -> None:
    paired = TYPES["paired"]
    odd = TYPES | {"paired": replace(paired, weights={**paired.weights, "image.attention": torch.zeros(8, 4)})}
    BySlot(layers="mlp").require(odd)
    message = (
        r"slot 'image/attention' of clients cifar-0, cifar-1 cannot be averaged with slot 'image/attention' of clients "
        r"flickr-0, flickr-1: 'attention.weight' is \[4, 4\] and \[8, 4\]"
    )
    with pytest.raises(ConfigError, match=message):
        CA_ONLY.require(odd)


def behind(model: GlobalModel, **digests: str) -> GlobalModel:
    """The model with something frozen in its encoders."""
    slots = {
        name: replace(place, frozen=tuple(one for one in digests.items() if one[0] in place.slot.modality))
        for name, place in model.slots.items()
    }
    return replace(model, slots=slots)


@pytest.mark.parametrize("rule", [BySlot(), CA_ONLY, ByName(), Separate()])
def test_layers_behind_other_frozen_values_are_not_averaged(rule: Averaging) -> None:
    factors = {"image.q.lora_A.default.weight": torch.zeros(2, 5), "image.q.lora_B.default.weight": torch.zeros(6, 2)}

    def with_factors(model: GlobalModel) -> GlobalModel:
        place = TensorSlot(Slot("image", "attention"), "q", model.slots["image.attention"].frozen)
        return replace(model, slots=model.slots | dict.fromkeys(factors, place), weights={**model.weights, **factors})

    image, paired = TYPES["image"], TYPES["paired"]
    for digests in ({}, {"image": "9xaa"}, {"text": "9xbb"}, {"image": "9xaa", "text": "9xbb"}):
        rule.require({"a": with_factors(behind(image, image="9xaa")), "b": with_factors(behind(paired, **digests))})
    message = "cifar-0, cifar-1.* flickr-0, flickr-1|flickr-0, flickr-1.* cifar-0, cifar-1"
    with pytest.raises(ConfigError, match=rf"({message}).* frozen in their 'image' encoders is not the same \(9x"):
        rule.require({"a": with_factors(behind(image, image="9xaa")), "b": with_factors(behind(paired, image="9xcc"))})


def test_factors_of_all_ranks_need_one_frozen_network_and_tensors_of_other_shapes_do_not() -> None:
    def model(rank: int, width: int, digest: str) -> GlobalModel:
        shapes = {"A": (rank, width), "B": (width, rank)}
        weights = {f"q.lora_{name}.default.weight": torch.zeros(shape) for name, shape in shapes.items()}
        place = TensorSlot(Slot("image", "trunk"), "q", (("image", digest),))
        return GlobalModel(weights, dict.fromkeys(weights, place), ("image",), (f"rank-{rank}",))

    with pytest.raises(ConfigError, match=r"clients rank-1 cannot .* of clients rank-3: .* \(9xbb and 9xaa\)"):
        SingularValues().require({"a": model(3, 4, "9xaa"), "b": model(1, 4, "9xbb")})
    SingularValues().require({"a": model(3, 4, "9xaa"), "b": model(1, 5, "9xbb")})
    ByName().require({"a": model(3, 4, "9xaa"), "b": model(1, 4, "9xbb")})


def test_layers_that_no_client_has_are_an_error() -> None:
    bare = {
        "image": GlobalModel(
            {"w": torch.zeros(SHAPE)}, {"w": TensorSlot(Slot("image", "trunk"), "w")}, ("image",), ("a",)
        )
    }
    with pytest.raises(ConfigError, match="no client's model has such layers; roles there are: trunk"):
        CA_ONLY.require(bare)


# ---- low-rank adapters


LAYERS = {"encoders.image.q": (6, 5), "encoders.text.v": (4, 7)}
COUNTS = (3.0, 1.0, 4.0)
RULES = (low_rank.Separate(), low_rank.Residual(), low_rank.Stacked(), low_rank.SingularValues(), low_rank.Padded())


def adapted(rank: int, seed: int, layers: tuple[str, ...] = tuple(LAYERS)) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tensors = {"encoders.image.project.weight": torch.randn(2, 6, generator=draw)}
    for layer in layers:
        out, inner = LAYERS[layer]
        tensors[f"{layer}.lora_A.default.weight"] = torch.randn(rank, inner, generator=draw)
        tensors[f"{layer}.lora_B.default.weight"] = torch.randn(out, rank, generator=draw)
    return tensors


def with_offsets(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, **{f"{layer}.base_layer.offset": torch.zeros(size) for layer, size in LAYERS.items()}}


def factors(tensors: Mapping[str, Tensor], layer: str) -> low_rank.Factors:
    return low_rank.Factors(tensors[f"{layer}.lora_A.default.weight"], tensors[f"{layer}.lora_B.default.weight"])


def mean_of(
    rule: low_rank.LowRankAveraging, old: Mapping[str, Mapping[str, Tensor]], sent: list[tuple[str, dict[str, Tensor]]]
):
    updates = [(type_name, tensors, count) for (type_name, tensors), count in zip(sent, COUNTS, strict=False)]
    return averaged(rule, global_models(old), updates)


def mean_change(sent: list[tuple[str, dict[str, Tensor]]], layer: str) -> Tensor:
    """The average of the full changes, term by term."""
    pairs = [
        (factors(tensors, layer), count)
        for (_, tensors), count in zip(sent, COUNTS, strict=False)
        if f"{layer}.lora_A.default.weight" in tensors
    ]
    total = sum(count for _, count in pairs)
    change = torch.zeros(LAYERS[layer])
    for own, count in pairs:
        for place in range(own.rank):
            change += count / total * torch.outer(own.b[:, place], own.a[place])
    return change


@pytest.mark.parametrize("rule", [low_rank.Residual(), low_rank.Stacked()])
@pytest.mark.parametrize("layer", LAYERS)
def test_exact_rules_equal_the_average_of_full_changes(rule: low_rank.LowRankAveraging, layer: str) -> None:
    old = {"both": with_offsets(adapted(3, 0))}
    sent = [("both", adapted(3, seed)) for seed in (1, 2, 3)]
    for round_number in (1, 2):  # offsets add up
        before = old["both"][f"{layer}.base_layer.offset"]
        old = mean_of(rule, old, sent)
        new = old["both"]
        full = new[f"{layer}.base_layer.offset"] + factors(new, layer).change
        torch.testing.assert_close(full, before + mean_change(sent, layer), atol=1e-6, rtol=1e-6)
        if round_number == 1 and isinstance(rule, low_rank.Stacked):
            assert not factors(new, layer).b.any()


def test_padded_factors_weigh_by_the_size_of_their_change() -> None:
    old = {"large": adapted(3, 0), "small": adapted(1, 9)}
    sent = [("large", adapted(3, 1)), ("small", adapted(1, 2))]
    new, layer = mean_of(low_rank.Padded(), old, sent), "encoders.text.v"
    big, little = (factors(tensors, layer) for _, tensors in sent)
    sizes = [count * float(own.change.norm()) for count, own in zip(COUNTS, (big, little), strict=False)]
    expected = (sizes[0] * big.a + sizes[1] * torch.cat([little.a, torch.zeros(2, 7)])) / sum(sizes)
    torch.testing.assert_close(factors(new["large"], layer).a, expected)
    torch.testing.assert_close(factors(new["small"], layer).a, expected[:1])


def test_clients_of_one_modality_average_what_they_have() -> None:
    old = {"both": adapted(2, 0), "image": adapted(2, 5, ("encoders.image.q",))}
    sent = [("both", adapted(2, 1)), ("image", adapted(2, 2, ("encoders.image.q",)))]
    new = mean_of(low_rank.SingularValues(), old, sent)
    torch.testing.assert_close(
        factors(new["image"], "encoders.image.q").change, factors(new["both"], "encoders.image.q").change
    )
    text = factors(sent[0][1], "encoders.text.v").change
    torch.testing.assert_close(factors(new["both"], "encoders.text.v").change, text, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_no_client_replied_or_counts(rule: low_rank.LowRankAveraging) -> None:
    old = {"both": with_offsets(adapted(2, 0))}
    for updates in ([], [("both", adapted(2, 1), 0.0)]):
        new = averaged(rule, global_models(old), updates)
        assert all(torch.equal(new["both"][name], value) for name, value in old["both"].items())


@pytest.mark.parametrize("rule", RULES)
def test_clients_that_exchange_factors_alone_have_those_averaged(rule: low_rank.LowRankAveraging) -> None:
    """Models with ``projection: own``, which train no layer behind the network."""

    def bare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in tensors.items() if "project" not in name}

    old, sent = with_offsets(adapted(2, 0)), [adapted(2, seed) for seed in (1, 2)]
    new = mean_of(rule, {"both": bare(old)}, [("both", bare(tensors)) for tensors in sent])["both"]
    expected = mean_of(rule, {"both": old}, [("both", tensors) for tensors in sent])["both"]
    assert new.keys() == bare(expected).keys()
    assert all(torch.equal(value, expected[name]) for name, value in new.items())


def test_a_factor_that_is_not_sent_is_as_it_was() -> None:
    old, sent = {"both": adapted(2, 0)}, adapted(2, 1)
    part = {name: sent[name] for name in low_rank.without(sent, factor="a")}
    assert len(part) == len(sent) - len(LAYERS)
    new = mean_of(low_rank.Separate(), old, [("both", part)])["both"]
    for layer in LAYERS:
        torch.testing.assert_close(factors(new, layer).a, factors(old["both"], layer).a)
        torch.testing.assert_close(factors(new, layer).b, factors(sent, layer).b)


def test_the_nearest_factors_and_the_first_directions() -> None:
    own = low_rank.Factors(torch.randn(2, 5), torch.randn(6, 2))
    torch.testing.assert_close(low_rank.best_factors(own.change, 2).change, own.change, atol=1e-5, rtol=1e-5)
    longer = low_rank.leading(own, 4)
    assert longer.rank == 4
    torch.testing.assert_close(longer.change, own.change)
    assert low_rank.leading(own, 1).change.allclose(torch.outer(own.b[:, 0], own.a[0]))


def test_rules_are_refused_without_tensors_to_average() -> None:
    def outline(tensors: Mapping[str, Tensor]) -> dict[str, GlobalModel]:
        return {"both": GlobalModel(tensors, {}, ("image",), ("a-1",))}

    with pytest.raises(ConfigError, match="no client's model has low-rank adapters"):
        low_rank.Separate().require(outline({"encoders.image.project.weight": torch.zeros(2)}))
    with pytest.raises(ConfigError, match=r"clients a-1 do not exchange that; set adapter.offset: true"):
        low_rank.Stacked().require(outline(adapted(2, 0)))
    low_rank.Stacked().require(outline(with_offsets(adapted(2, 0))))
    with pytest.raises(ConfigError, match="leave it at exact"):
        low_rank.Padded(mean="sequential")
    assert set(low_rank.factor_names(adapted(2, 0))) == set(LAYERS)
