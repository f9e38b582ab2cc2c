import pytest
import torch

from polyfed.models.pooling import (
    last_valid,
    lengths_of,
    masked_mean,
    reversed_valid,
    trimmed,
    valid_positions,
)

TOKENS = torch.tensor([[5, 3, 7, 0, 0], [2, 0, 0, 0, 0], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])


@pytest.fixture
def states() -> torch.Tensor:
    return torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))


def test_masked_mean_equals_the_mean_of_each_valid_part(states):
    mask = valid_positions(TOKENS, 0)
    got = masked_mean(states, mask)
    for row, length in enumerate([3, 1, 5]):
        torch.testing.assert_close(got[row], states[row, :length].mean(0))
    assert (got[3] == 0).all()


def test_masked_mean_ignores_what_padding_holds(states):
    mask = valid_positions(TOKENS, 0)
    other = torch.where(mask.unsqueeze(-1), states, torch.full_like(states, 1e6))
    assert torch.equal(masked_mean(states, mask), masked_mean(other, mask))


def test_last_valid_picks_the_last_token_of_each_row(states):
    lengths = lengths_of(valid_positions(TOKENS, 0))
    assert lengths.tolist() == [3, 1, 5, 1]
    got = last_valid(states, lengths)
    expected = torch.stack([states[0, 2], states[1, 0], states[2, 4], states[3, 0]])
    assert torch.equal(got, expected)


def test_reversed_valid_turns_only_the_valid_part(states):
    lengths = torch.tensor([3, 1, 5, 1])
    got = reversed_valid(states, lengths)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(got[row, :length], states[row, :length].flip(0))
        assert torch.equal(got[row, length:], states[row, length:])
    assert torch.equal(reversed_valid(got, lengths), states)


@pytest.mark.parametrize(("rows", "width"), [(slice(0, 2), 3), (slice(1, 2), 1), (slice(3, 4), 1), (slice(0, 0), 1)])
def test_trimmed_drops_columns_of_padding_only(rows, width):
    assert torch.equal(trimmed(TOKENS[rows], 0), TOKENS[rows, :width])


def test_trimmed_leaves_other_devices_alone():
    assert trimmed(TOKENS.to("meta"), 0).shape == TOKENS.shape
