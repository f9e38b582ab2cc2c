"""Usual norms and sample counts of a cohort, and clients that exceed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from asking import ask_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.filters import Ask, NormClip, RecentNorms, Reply, counted
from polyfed.privacy.rules import Clipping
from polyfed.wire.limits import Limits
from polyfed.wire.payload import Payload, Representations, Weights


def info(name: str, samples: int = 10, architecture: str = "a") -> ClientInfo:
    return ClientInfo(name, "g", ("image",), "classification", samples, 5, architecture)


def vector(length: float, entries: int = 4) -> Tensor:
    return torch.full((entries,), length / entries**0.5)


# ---- how much a client counts


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([100, 120, 90, 10**12], [100, 120, 90, 660]),  # 6 x 110
        ([100, 100, 100, 500], [100, 100, 100, 500]),  # a large hospital
        ([0, 0, 0, 50, 60, 70, 10**12], [0, 0, 0, 50, 60, 70, 390]),  # clients without samples are not in the median
        ([10, 10**12], [10, 10**12]),  # of two, either may be the odd one
        ([10, 10**12, 0], [10, 10**12, 0]),
    ],
)
def test_no_client_counts_for_more_than_some_medians(samples: list[int], expected: list[int]) -> None:
    assert list(counted([info(str(k), n) for k, n in enumerate(samples)], 6.0).values()) == expected


def test_the_median_is_of_an_architecture_or_of_a_modality_if_it_has_too_few_clients() -> None:
    sizes = {"a": [10, 10, 12], "b": [5000, 6000, 7000], "c": [10**12]}
    clients = [info(f"{type_name}{k}", n, type_name) for type_name, own in sizes.items() for k, n in enumerate(own)]
    after = counted(clients, 6.0)
    assert [after[f"b{k}"] for k in range(3)] == sizes["b"]
    assert after["c0"] == 6 * 5000


def test_sizes_of_other_modalities_do_not_matter() -> None:
    texts = [replace(info(f"t{k}", 200, "text"), modalities=("text",)) for k in range(3)]
    assert counted([info("images", 50_000, "image"), *texts], 6.0)["images"] == 50_000


# ---- what crosses


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ({"w": torch.zeros(4, dtype=torch.float16)}, r"asked for, first at 'w': float16 \[4\], expected float32 \[4\]"),
        ({"w": torch.zeros(4, dtype=torch.float64)}, r"'w': float64 \[4\], expected float32 \[4\]"),
        ({"n": torch.tensor(True)}, r"'n': bool \[\], expected int64 \[\]"),
        ({"w": torch.zeros(5)}, r"'w': float32 \[5\], expected float32 \[4\]"),
        ({"n": torch.tensor(9)}, "'n' of whole numbers fell by 1"),
        ({"n": torch.tensor(-(2**63))}, "'n' of whole numbers fell"),
    ],
)
def test_types_of_numbers_are_the_servers_and_counters_count_up(new: dict[str, Tensor], reason: str) -> None:
    client = info("c")
    ask = ask_of([client], {"weights": Weights({"w": torch.zeros(4), "n": torch.tensor(10)})})
    sent = ask.sent["c"].bundles["weights"]
    with pytest.raises(PayloadError, match=reason):
        ask.require(Reply.received(Payload({"weights": Weights({**sent, **new})}), client))


def test_a_negative_variance_is_refused() -> None:
    payload = Payload({"weights": Weights({"norm.running_var": torch.tensor([1.0, -0.5])})})
    with pytest.raises(PayloadError, match=r"'norm.running_var' has a variance of -0.5"):
        payload.require_sound(Limits())


# ---- norm clipping


def passed(link: NormClip, ask: Ask, replies: Mapping[str, Payload]) -> list[Payload]:
    clients = {client.id: client for client in ask.clients}
    return [reply.payload for reply in link((Reply.received(one, clients[name]) for name, one in replies.items()), ask)]


def clip_lengths(
    lengths: Mapping[str, float], recent: RecentNorms, notes: dict[str, str] | None = None, times: float = 4.0
) -> list[float]:
    """How long updates are after an ask, of those that come so long; of ids that begin alike, one architecture each."""
    sent = vector(30.0)
    ask = ask_of([info(name, architecture=name[0]) for name in lengths], {"weights": Weights({"w": sent})}, told=notes)
    replies = {name: Payload({"weights": Weights({"w": vector(30.0 + more)})}) for name, more in lengths.items()}
    payloads = passed(NormClip(Clipping(times=times), recent), ask, replies)
    return [float((payload.bundles["weights"]["w"] - sent).norm()) for payload in payloads]


def test_nothing_waits() -> None:
    clients, drawn = [info(f"c{k}") for k in range(3)], list[str]()

    def replies() -> Iterator[Reply]:
        for client in clients:
            drawn.append(client.id)
            yield Reply.received(Payload({"weights": Weights({"w": vector(50.0)})}), client)

    passing = NormClip(Clipping(), {})(replies(), ask_of(clients, {"weights": Weights({"w": vector(3.0)})}))
    assert next(passing).sender.id == "c0"
    assert drawn == ["c0"]


def test_the_first_ask_is_unbounded_and_the_last_bounds_the_next() -> None:
    recent, notes = RecentNorms(), dict[str, str]()
    assert clip_lengths({"a0": 1.0, "a1": 2.0, "a2": 1e3}, recent) == pytest.approx([1.0, 2.0, 1e3], rel=1e-4)
    result = clip_lengths({"a0": 1.0, "a1": 7.9, "a2": 16.0, "a3": 160.0}, recent, notes)
    assert result == pytest.approx([1.0, 7.9, 8.0, 8.0], rel=1e-3)
    too_long = "times as long as aggregation.clip allows"
    assert notes == {"a2": f"weights: 2 {too_long}", "a3": f"weights: 20 {too_long}"}
    # norms before clipping: a rise of all is held once
    assert clip_lengths({"a0": 40.0, "a1": 47.0, "a2": 50.0}, recent) == pytest.approx([40.0, 47.0, 47.8], rel=1e-3)


def test_what_is_within_stays_the_very_payload_and_counters_pass() -> None:
    recent: RecentNorms = {"fit/weights/a": {"c0": 1.0, "c1": 1.0, "c2": 1.0}}
    sent = {"w": vector(3.0), "n": torch.tensor(1)}
    short = Payload({"weights": Weights({"w": vector(4.0), "n": torch.tensor(1 << 40)}), "num_examples": 7})
    long = Payload({"weights": Weights({"w": vector(43.0), "n": torch.tensor(2)}), "num_examples": 7})
    ask = ask_of([info("c0"), info("c1")], {"weights": Weights(sent)})
    first, second = passed(NormClip(Clipping(), recent), ask, {"c0": short, "c1": long})
    assert first is short
    assert second.scalars["num_examples"] == 7  # a shorter update is no less counted
    assert int(second.bundles["weights"]["n"]) == 2


def test_architectures_and_fields_have_medians_of_their_own() -> None:
    recent: RecentNorms = {"fit/weights/a": {"a0": 1.0, "a1": 1.0, "a2": 1.0}}
    assert clip_lengths({"a0": 50.0, "b0": 50.0}, recent) == pytest.approx([4.0, 50.0], rel=1e-3)
    rows = Payload({"representations": Representations({"text": 9 * torch.eye(2)}, order="o")})
    assert passed(NormClip(Clipping(), recent), ask_of([info("a0")]), {"a0": rows}) == [rows]


def test_asks_of_too_few_replies_count_together_and_a_client_once() -> None:
    """Asks of single clients, by a server that steps after each reply."""
    recent = RecentNorms()
    asked = [("a0", 1.0), ("a0", 50.0), ("a0", 1.0), ("a1", 2.0), ("a2", 3.0), ("a0", 80.0), ("a3", 2.0)]
    result = [clip_lengths({name: length}, recent)[0] for name, length in asked]
    assert result == pytest.approx([1.0, 50.0, 1.0, 2.0, 3.0, 8.0, 2.0], rel=1e-3)
    assert recent["fit/weights/a"] == pytest.approx({"a0": 80.0, "a1": 2.0, "a2": 3.0, "a3": 2.0}, rel=1e-3)
    clip_lengths({"a0": 1.0, "a1": 1.0, "a4": 1.0}, recent)  # an ask with enough stands alone
    assert list(recent["fit/weights/a"]) == ["a0", "a1", "a4"]


def test_most_who_do_not_move_bound_no_client() -> None:
    recent = RecentNorms()
    for _ in range(2):
        assert clip_lengths({"a0": 0.0, "a1": 0.0, "a2": 5.0}, recent) == pytest.approx([0.0, 0.0, 5.0], abs=1e-3)


def test_changes_are_as_long_as_they_are() -> None:
    recent: RecentNorms = {"fit/controls/a": {"c0": 1.0, "c1": 1.0, "c2": 1.0}}
    sent = {"weights": Weights({"w": vector(20.0)}), "controls": Weights({"w": vector(50.0)})}
    ask = ask_of([info("c0")], sent, changes={"controls": sent["weights"]})
    (result,) = passed(NormClip(Clipping(), recent), ask, {"c0": Payload({"controls": Weights({"w": vector(50.0)})})})
    assert float(result.bundles["controls"]["w"].norm()) == pytest.approx(4.0)


def test_a_bundle_of_rows_has_one_norm() -> None:
    recent: RecentNorms = {"fit/rows/a": {"c0": 1.0, "c1": 1.0, "c2": 1.0}}
    rows = Representations({"image": torch.tensor([[6.0, 0.0], [0.0, 8.0]])}, order="here")
    (result,) = passed(NormClip(Clipping(), recent), ask_of([info("c0")]), {"c0": Payload({"rows": rows})})
    bundle = result.bundles["rows"]
    assert isinstance(bundle, Representations)
    assert bundle.order == "here"
    torch.testing.assert_close(bundle["image"], torch.tensor([[2.4, 0.0], [0.0, 3.2]]))


norms = st.dictionaries(
    st.sampled_from([f"{type_name}{k}" for type_name in "ab" for k in range(5)]), st.just(0.0) | st.floats(0.1, 1e3)
)


@given(st.lists(norms, max_size=4), st.sampled_from([0.5, 1.0, 4.0]))
def test_every_update_is_as_long_as_by_a_loop(asks: list[dict[str, float]], times: float) -> None:
    recent, last = RecentNorms(), dict[str, dict[str, float]]()
    for lengths in asks:
        expected = list[float]()
        for name, length in lengths.items():
            known = sorted(last.get(name[0], {}).values())
            middle = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if len(known) >= 3 else 0.0
            expected.append(min(length, times * middle) if middle else length)
        for type_name in "ab":
            own = {name: length for name, length in lengths.items() if name[0] == type_name}
            last[type_name] = own if len(own) >= 3 else last.get(type_name, {}) | own
        assert clip_lengths(lengths, recent, times=times) == pytest.approx(expected, rel=1e-3, abs=0.01)
