"""YAML that somebody handed over: tags, bombs and nonsense end in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyfed.core.errors import ConfigError
from polyfed.core.untrusted import yaml_content
from polyfed.runs.config_files import read_config
from polyfed.runs.experiment import Experiment

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{k + 1}: &a{k + 1} [{', '.join([f'*a{k}'] * 9)}]\n" for k in range(30))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object/apply:os.system [echo]", "could not determine a constructor"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("a: !!int x", "invalid literal"),
        ("a: !!timestamp x", ""),
        ("a: 2020-13-45", "month must be in"),
        ("a: !!binary 'x'", "base64"),
        ("a: " + "1" * 5000, "digits"),
        ("a: " + "[" * 10_000, "nested deeper than 50 levels"),
        ("a: " + "{b: " * 10_000, "nested deeper than 50 levels"),
        ("- " * 10_000 + "a", "nested deeper than 50 levels"),
        ("a: &a [*a]", "an alias stands for what it is part of"),
        (LAUGHS, "more than 100,000 values"),
        ("a: [" + "x, " * 200_000 + "]", "more than 100,000 values"),
        ("a: " + "x" * (1 << 22), "4,194,307 characters, the limit is 4,194,304"),
        ("? [a]\n: b", "unhashable"),
        ("a: b: c", "not allowed"),
        ("a: *b", "undefined alias"),
        ("a: \x1b[2J", "unacceptable character"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"'{file}' is not YAML: .*{message}") as caught:
        Experiment.load(file)
    assert "\n" not in str(caught.value)


def test_plain_values_aliases_and_merges_stay(tmp_path: Path) -> None:
    text = "base: &b {x: 1, y: [2, &z three]}\nown:\n  <<: *b\n  x: 4\nagain: *z\nnothing:\n"
    base = {"x": 1, "y": [2, "three"]}
    assert yaml_content(text) == {"base": base, "own": base | {"x": 4}, "again": "three", "nothing": None}
    assert yaml_content("") is None


def test_a_configuration_that_extends_itself_is_refused(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {base}.yaml\n")
    with pytest.raises(
        ConfigError, match=r"'.*a\.yaml' extends itself: .*a\.yaml -> .*b\.yaml -> .*c\.yaml -> .*a\.yaml"
    ):
        read_config(tmp_path / "a.yaml")


@pytest.mark.parametrize("value", ["2020-13-45", "!!int x", "[" * 10_000])
def test_a_value_of_the_command_line_that_is_no_yaml_is_text(value: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.rounds: "):
        Experiment.load("scenes-demo", [f"run.rounds={value}"])
