"""Random streams."""

from __future__ import annotations

import torch

from polyfed.core.randomness import derive_seed, generator, isolated


def test_every_part_and_their_order_matter() -> None:
    assert len({derive_seed(*parts) for parts in [(1, 2), (2, 1), (12,), (1, "2"), ("1", 2), (1, 2, ""), (1,)]}) == 7
    assert derive_seed(0, 3, "image-1", "batches") == derive_seed(0, 3, "image-1", "batches")


def test_seeds_do_not_change_between_versions() -> None:
    assert derive_seed(0, "a") == 7199636621922560063


def test_a_stream_does_not_depend_on_others() -> None:
    first = torch.rand(3, generator=generator(1, "x"))
    torch.rand(100)
    generator(1, "y")
    assert torch.equal(first, torch.rand(3, generator=generator(1, "x")))


def test_isolation_seeds_the_global_generator_and_restores_it() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    with isolated(1, "step"):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(4), expected)
    with isolated(1, "step"):
        assert torch.equal(torch.rand(2), inside)
