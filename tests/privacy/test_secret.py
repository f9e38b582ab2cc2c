"""Draws from a secret: their distribution, who can repeat them, and how secrets are kept."""

from __future__ import annotations

import math
import stat
from pathlib import Path

import pytest
import torch
from scipy.stats import kstest

from polyfed.core.errors import ConfigError
from polyfed.privacy.secret import kept_secret, keyed_digest, normal_draws, read_secret, uniform_draws

KEY = keyed_digest(b"fixed", b"for tests")


def test_draws_are_uniform_and_normal() -> None:
    assert kstest(uniform_draws(KEY, 50_000).numpy(), "uniform").pvalue > 0.01
    assert kstest(normal_draws(KEY, 50_000).numpy(), "norm").pvalue > 0.01


def test_draws_repeat_with_the_key_and_share_nothing_with_another() -> None:
    first, again = normal_draws(KEY, 4_000), normal_draws(KEY, 4_000)
    assert torch.equal(first, again)
    other = normal_draws(keyed_digest(b"other", b"for tests"), 4_000)
    assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 4 / math.sqrt(4_000)


def test_long_streams_do_not_repeat_a_block() -> None:
    draws = uniform_draws(KEY, 3_500_000)
    assert len(draws) == len(draws.unique()) == 3_500_000
    assert len(uniform_draws(KEY, 0)) == 0


def test_parts_of_a_digest_do_not_run_into_each_other() -> None:
    assert keyed_digest(b"s", b"ab", b"c") != keyed_digest(b"s", b"a", b"bc")
    assert keyed_digest(b"s", b"ab") != keyed_digest(b"t", b"ab")


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    secret = kept_secret(path)
    assert len(secret) == 32
    assert kept_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]
    assert kept_secret(tmp_path / "secret") != secret


def test_secrets_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"cannot be read .*head -c 32"):
        read_secret(path)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes; give it at least 32"):
        read_secret(path)
    path.write_bytes(bytes(32))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"others can read the secret .*chmod 600"):
        read_secret(path)
