"""Masked sums against plain ones, shares by hand, and parties that lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyfed.core.errors import ConfigError, PayloadError
from polyfed.privacy.masking import keys
from polyfed.privacy.masking.party import Party, Unmasking, context_of
from polyfed.privacy.secure_sum import FixedPoint, PairwiseMasks, Residues, total

CONTEXT = context_of("run", 1, 0, "fit")
REQUIRED = PairwiseMasks(threshold=0.6).required
Shares = dict[str, dict[str, bytes]]


def parties(n: int, context: bytes = CONTEXT) -> dict[str, Party]:
    return {f"c-{k}": Party(f"c-{k}", context) for k in range(n)}


def exchanged(group: Mapping[str, Party], absent: Collection[str] = ()) -> dict[str, bytes]:
    """Keys of all, and shares of those who are still there; each then is ready."""
    members = {name: party.public for name, party in group.items()}
    made = {name: party.shares(members, REQUIRED) for name, party in group.items() if name not in absent}
    for name in made:
        group[name].receive({other: own[name] for other, own in made.items() if other != name}, REQUIRED)
    return members


def words_of(names: Collection[str], length: int = 5) -> dict[str, Residues]:
    draws = np.random.default_rng(0)
    return {name: draws.integers(0, 2**32, length, dtype=np.uint64).astype(np.uint32) for name in names}


def ready(n: int) -> dict[str, Party]:
    group = parties(n)
    exchanged(group)
    return group


@given(st.data(), st.integers(3, 8), st.sampled_from([32, 64]))
def test_masked_sums_are_the_plain_ones_for_any_dropouts(data: st.DataObject, n: int, bits: int) -> None:
    group = parties(n)
    required = max(REQUIRED(n), 3)
    # each party stays, or leaves before shares, before words, or before the end
    gone = data.draw(st.lists(st.sampled_from(["shares", "words", "end"]), max_size=n - required))
    when = dict(zip(group, data.draw(st.permutations(gone + ["never"] * (n - len(gone)))), strict=True))
    members = exchanged(group, [name for name in group if when[name] == "shares"])
    shared = [name for name in group if when[name] != "shares"]
    survivors = [name for name in shared if when[name] != "words"]
    plain: dict[str, Residues] = {**words_of(group)}
    if bits == 64:
        plain = {name: value.astype(np.uint64) for name, value in plain.items()}
    sent = {name: group[name].masked(plain[name]) for name in survivors}
    shares = {name: group[name].opened(survivors, REQUIRED) for name in survivors if when[name] == "never"}

    got = Unmasking(CONTEXT, members, shared, REQUIRED(n)).sum(total(list(sent.values())), survivors, shares)

    assert (got == total([plain[name] for name in survivors])).all()
    assert all((sent[name] != plain[name]).any() for name in survivors)


def test_shares_worked_by_hand() -> None:
    # 7 + 3x + 2x^2 at 1, 2, 3; Lagrange at 0: 3 * 12 - 3 * 21 + 34 = 7
    points = {x: keys.polynomial([7, 3, 2], x) for x in (1, 2, 3)}
    assert points == {1: 12, 2: 21, 3: 34}
    assert keys.interpolated(points) == 7
    # a line through two of them meets 0 elsewhere: 2 * 12 - 21 = 3
    assert keys.interpolated({1: 12, 2: 21}) == 3


def test_any_threshold_of_shares_and_no_fewer_give_the_secret() -> None:
    secret = keys.new_key()
    shares = dict(enumerate(keys.split(secret, 5, 3), 1))
    assert keys.secret_of({x: shares[x] for x in (1, 4, 5)}) == secret == keys.secret_of(shares)
    assert keys.secret_of({x: shares[x] for x in (2, 3)}) != secret


def test_a_false_share_among_enough_right_ones_does_no_harm_and_among_too_few_is_named() -> None:
    group, plain = ready(4), words_of([f"c-{k}" for k in range(4)])
    unmasking = Unmasking(CONTEXT, {name: one.public for name, one in group.items()}, list(group), 3)
    sent = total([group[name].masked(plain[name]) for name in group])
    shares: Shares = {name: group[name].opened(group, REQUIRED) for name in group}
    shares["c-1"]["c-0"] = bytes(keys.SHARE_BYTES)

    assert (unmasking.sum(sent, list(group), shares) == total(list(plain.values()))).all()

    shares["c-2"]["c-0"] = bytes(keys.SHARE_BYTES)
    with pytest.raises(PayloadError, match=r"masks of 'c-0'.*some are false"):
        unmasking.sum(sent, list(group), shares)
    del shares["c-1"], shares["c-2"]
    with pytest.raises(PayloadError, match=r"2 shares, the threshold is 3"):
        unmasking.sum(sent, list(group), shares)


def test_a_server_cannot_have_both_secrets_of_one_client() -> None:
    group, plain = ready(4), words_of([f"c-{k}" for k in range(4)])
    public = {name: one.public for name, one in group.items()}
    sent = {name: group[name].masked(plain[name]) for name in group}
    first = {name: group[name].opened(group, REQUIRED) for name in group}
    assert all(group[name].opened(group, REQUIRED) == first[name] for name in group), "the same, if it is asked again"
    assert all(not (one.seed or one.for_masks or one.for_shares or one.held) for one in group.values())

    # now as if c-0 had dropped out: that would give the key to its pairwise masks as well
    for name in ("c-1", "c-2", "c-3"):
        with pytest.raises(PayloadError, match="keys are used once"):
            group[name].opened(["c-1", "c-2", "c-3"], REQUIRED)
    # what it has takes off the own mask, and leaves the pairwise ones
    assert (Unmasking(CONTEXT, public, ["c-0"], 3).sum(sent["c-0"], ["c-0"], first) != plain["c-0"]).all()


def test_a_server_that_announces_different_survivors_gets_too_few_shares_of_either_kind() -> None:
    group = ready(5)
    for name, party in group.items():
        party.masked(words_of([name])[name])
    with_it, without = list(group), [name for name in group if name != "c-0"]
    shares = {name: group[name].opened(with_it if k < 2 else without, REQUIRED) for k, name in enumerate(without)}

    of_seed = {int(name[-1]) + 1: own["c-0"] for name, own in list(shares.items())[:2]}
    for held in (of_seed, {int(name[-1]) + 1: own["c-0"] for name, own in list(shares.items())[2:]}):
        with pytest.raises(PayloadError, match="the threshold is 3"):
            keys.recovered(held, REQUIRED(5), lambda _: True)


def test_parties_do_everything_once_and_in_order() -> None:
    group = parties(3)
    with pytest.raises(PayloadError, match="keys are used once"):
        group["c-0"].masked(words_of(["c-0"])["c-0"])
    exchanged(group)
    words = words_of(["c-0"])["c-0"]
    group["c-0"].masked(words)
    with pytest.raises(PayloadError, match="keys are used once"):
        group["c-0"].masked(words + 1)
    with pytest.raises(PayloadError, match="keys are used once"):
        group["c-0"].shares({name: one.public for name, one in group.items()}, REQUIRED)


def test_who_asks_again_with_all_as_it_was_gets_the_same_answer() -> None:
    group = parties(4)
    members = {name: party.public for name, party in group.items()}
    made = {name: party.shares(members, REQUIRED) for name, party in group.items()}
    process = Party.from_json(group["c-0"].to_json())  # another one, after the first died with its answer
    assert process.shares(members, REQUIRED) == made["c-0"]
    with pytest.raises(PayloadError, match="keys are used once"):
        process.shares({name: members[name] for name in ("c-0", "c-1", "c-2")}, REQUIRED)
    for_it = {name: shares["c-0"] for name, shares in made.items() if name != "c-0"}
    process.receive(for_it, REQUIRED)
    words = words_of(["c-0"])["c-0"]
    sent = process.masked(words)
    process = Party.from_json(process.to_json())
    with pytest.raises(PayloadError, match="keys are used once"):
        process.receive({name: for_it[name] for name in ("c-1", "c-2")}, REQUIRED)
    process.receive(for_it, REQUIRED)
    assert (process.masked(words) == sent).all()
    with pytest.raises(PayloadError, match="keys are used once"):
        process.masked(words + 1)


def test_keys_of_an_earlier_round_open_nothing_of_this_one() -> None:
    earlier, now = parties(3, context_of("run", 1, 0, "fit")), parties(3, context_of("run", 2, 0, "fit"))
    members = {name: party.public for name, party in now.items()} | {"c-2": earlier["c-2"].public}
    made = now["c-0"].shares(members, REQUIRED)
    with pytest.raises(PayloadError, match=r"own keys are not among"):
        now["c-2"].shares(members, REQUIRED)
    # shares of another round, although keys are right
    again = parties(3)
    all_now = {name: party.public for name, party in again.items()}
    of_all = {name: party.shares(all_now, REQUIRED) for name, party in again.items()}
    with pytest.raises(PayloadError, match=r"'c-0': shares that were not made for this client and request"):
        again["c-2"].receive({"c-0": made["c-2"], "c-1": of_all["c-1"]["c-2"]}, REQUIRED)


def test_keys_and_shares_that_are_none_are_refused_by_name() -> None:
    group = parties(3)
    members = {name: party.public for name, party in group.items()}
    for wrong, reason in [
        ({name: members[name] for name in ("c-0", "c-1")}, "a sum of 2 clients"),
        (members | {"c-2": members["c-1"]}, "the same key"),
        (members | {"c-2": b"short"}, "keys of 'c-2' are 5 bytes"),
        (members | {"c-0": members["c-1"]}, "own keys"),
    ]:
        with pytest.raises(PayloadError, match=reason):
            Party.from_json(group["c-0"].to_json()).shares(wrong, REQUIRED)
    # a point of low order, with which all would agree on zero
    low = members | {"c-2": bytes(32) + members["c-2"][32:]}
    with pytest.raises(PayloadError, match="not a public key"):
        group["c-0"].shares(low, REQUIRED)


def test_a_party_that_is_asked_for_too_few_survivors_or_strangers_reveals_nothing() -> None:
    for left, reason in [(["c-0", "c-1"], "unmasking takes 3"), (["c-0", "c-1", "c-9"], "c-9"), (["c-1"], "asked")]:
        group = ready(4)
        group["c-0"].masked(words_of(["c-0"])["c-0"])
        with pytest.raises(PayloadError, match=reason):
            group["c-0"].opened(left, REQUIRED)


def test_parties_are_the_same_when_they_wake() -> None:
    group = ready(3)
    assert Party.from_json(group["c-1"].to_json()) == group["c-1"]
    assert group["c-1"].seed.hex() not in repr(group["c-1"])


@pytest.mark.parametrize("bits", [32, 64])
def test_whole_numbers_keep_range_and_resolution(bits: int) -> None:
    numbers = FixedPoint(8.0, bits)  # type: ignore[arg-type]
    values = np.random.default_rng(1).uniform(-8, 8, (5, 1000)).astype(np.float32)
    shares = np.array([0.1, 0.2, 0.3, 0.25, 0.15])
    words = total([numbers.encoded(row, share) for row, share in zip(values, shares, strict=True)])
    exact = (values.astype(np.float64) * shares[:, None]).sum(0)
    assert np.abs(numbers.mean(words, 1.0, values.dtype) - exact).max() <= 5 * numbers.resolution / 2 + 1e-14


def test_values_at_both_ends_of_the_range_do_not_wrap() -> None:
    numbers = FixedPoint(8.0)
    ends = np.array([8.0, -8.0], np.float32)
    words = total([numbers.encoded(ends, 1 / 7) for _ in range(7)])
    assert np.abs(numbers.mean(words, 1.0, ends.dtype) - ends).max() <= 7 * numbers.resolution


def test_counters_are_whole_numbers_of_their_own_range() -> None:
    counters = np.array([100_000, 3], np.int64)
    words = FixedPoint(1.0).encoded(counters, 1.0)
    assert FixedPoint(1.0).mean(words, 1.0, counters.dtype).tolist() == [100_000, 3]


def test_what_is_beyond_the_range_is_refused() -> None:
    with pytest.raises(PayloadError, match=r"does not fit 32 bits of range 8; raise aggregation.secure.range"):
        FixedPoint(8.0).encoded(np.array([9.0]), 1.0)
    with pytest.raises(PayloadError, match="does not fit"):
        FixedPoint(8.0).encoded(np.array([np.nan]), 1.0)


def test_thresholds_are_more_than_half_and_shares_are_rounded_up() -> None:
    assert [PairwiseMasks().required(n) for n in (3, 4, 9, 10)] == [2, 3, 6, 7]
    assert PairwiseMasks(threshold=2).required(10) == 6
    for wrong in (0.5, 1, 1.5):
        with pytest.raises(ConfigError, match="threshold"):
            PairwiseMasks(threshold=wrong)
