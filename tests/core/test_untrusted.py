"""Texts from elsewhere: JSON, YAML and words to be shown."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path

import pytest

from polyfed.core import untrusted
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.untrusted import TEXT_BYTES, PlainFormatter, lines, markdown, plain, read_json, yaml_content
from polyfed.runs.config_files import read_config
from polyfed.runs.experiment import Experiment

HOSTILE = "a\x1b[31m\x1b]0;title\x07 b\r\nround 3: client 'c' is \u202eexcluded\x9b2J\x7f"


@pytest.mark.parametrize("value", [None, True, -(1 << 63), (1 << 63) - 1, 0.5, 'größe \u4e2d \\ " [', [], {"a": [{}]}])
def test_json_is_read_as_json_reads_it(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert read_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 33 + "]" * 33, "nested deeper than 32 levels"),
        ("[" * 100_000, "nested deeper than 32 levels"),
        ("[]]", "a closing bracket that nothing opened"),
        ('{"a":' * 40 + "1" + "}" * 40, "nested deeper"),
        ('"' + "x" * TEXT_BYTES + '"', r"text of 2,097,154 bytes, the limit is 2,097,152 \(limits\.text_bytes\)"),
        ('"' + "\u4e2d" * (TEXT_BYTES // 3 + 1) + '"', "text of 2,097,155 bytes"),
        ("[" + "0," * (TEXT_BYTES // 2 - 2) + "0]", "more than 131,072 values"),
        (str(1 << 63), r"the whole number 9223372036854775808 is beyond 64 bits"),
        ("1" + "0" * 400, r"the whole number 10000000000000000000\.\.\. is beyond 64 bits"),
        ("1" * 100_000, "beyond 64 bits"),
        ("{", "damaged message: JSONDecodeError"),
        ('"\\', "damaged message: JSONDecodeError"),
    ],
)
def test_what_cannot_be_borne_is_refused(text: str, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        read_json(text)


@pytest.mark.parametrize("value", [None, 7, b"{}", ["{}"]])
def test_other_values_than_texts_are_refused(value: object) -> None:
    with pytest.raises(PayloadError, match="where text is expected"):
        read_json(value)


def test_brackets_in_texts_do_not_count() -> None:
    text = json.dumps({"a": "[" * 1000 + '\\"{' * 1000, "b": "\\"})
    assert read_json(text) == json.loads(text)


LONG = ("]" * (1 << 19), "{}}}" * (1 << 17), '\\"' * 125_000, '"' + '\\"' * 125_000, '"\\' * 125_000)


@pytest.mark.parametrize("text", [*LONG, '""' * 200_000, "[]," * 100_000])
def test_hostile_text_takes_little_memory(text: str) -> None:
    """The time to refuse it is linear too: were it not, this test would take many minutes."""
    tracemalloc.start()
    with pytest.raises(PayloadError):
        read_json(text)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(text) + (1 << 20)
    tracemalloc.stop()


def test_json_of_a_file_may_be_long_but_not_deep() -> None:
    values = list(range(TEXT_BYTES // 4))
    assert untrusted.file_json(json.dumps(values)) == values
    with pytest.raises(ValueError, match="nested too deeply"):
        untrusted.file_json("[" * 100_000)


def test_nothing_that_is_shown_has_an_effect() -> None:
    shown = plain(HOSTILE)
    assert len(shown) == len(HOSTILE)
    assert shown.isprintable()
    assert shown.startswith("a\u241b[31m\u241b]0;title\u2407 b\u240d\u240around 3")
    assert plain("a\u200bb\u200dc\u2060d\U000e0041e\u00adf") == "a\ufffdb\ufffdc\ufffdd\ufffde\ufffdf"
    assert plain("größe, 中文 🙂 — 3 < 4") == "größe, 中文 🙂 — 3 < 4"


def test_lines_of_an_entry_do_not_pass_for_entries() -> None:
    shown = "Traceback\n    --- round 1, client b\n      x\u241b[2J"
    assert lines("Traceback\n--- round 1, client b\n  x\x1b[2J\n") == shown


def test_markdown_has_no_markup() -> None:
    assert markdown("<script>alert(1)</script> | ![x](http://a) `c`\n# d & e") == (
        "&lt;script>alert(1)&lt;/script> \\| !\\[x](http\\://a) \\`c\\`\u240a# d &amp; e"
    )
    assert markdown("image->text R@1 (macro_f1)") == "image->text R@1 (macro_f1)"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("*b* **c** ~~d~~ $e$", r"\*b\* \*\*c\*\* \~\~d\~\~ \$e\$"),
        ("_c_ __d__ (_e_)", r"\_c\_ \_\_d\_\_ (\_e\_)"),
        ("text_to_image_r@10 größe_1", "text_to_image_r@10 größe_1"),
        ("http://a.b, HTTPS://c, www.d.e, Www.f", r"http\://a.b, HTTPS\://c, www\.d.e, Www\.f"),
        ("mailto:a.b@c.de", r"mailto\:a.b\@c.de"),
        ("# a", r"\# a"),
        ("> a", r"\> a"),
        ("- a", r"\- a"),
        ("---", r"\---"),
        ("1. a", r"1\. a"),
        ("-", "-"),
        ("-3.5", "-3.5"),
        ("1.5", "1.5"),
    ],
)
def test_what_would_be_markdown_is_escaped(text: str, escaped: str) -> None:
    assert markdown(text) == escaped


def test_a_record_of_a_log_is_one_entry() -> None:
    record = logging.LogRecord("polyfed", logging.WARNING, "", 0, "client %s", ("a\nERROR: b\x1b[2J",), None)
    assert PlainFormatter("%(levelname)s: %(message)s").format(record) == "WARNING: client a\n    ERROR: b\u241b[2J"


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
    with pytest.raises(ConfigError, match=r"a\.yaml' extends itself: .*a\.yaml -> .*b\.yaml -> .*c\.yaml -> .*a\.yaml"):
        read_config(tmp_path / "a.yaml")


@pytest.mark.parametrize("value", ["2020-13-45", "!!int x", "[" * 10_000])
def test_a_value_of_the_command_line_outside_yaml_is_text(value: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.rounds: "):
        Experiment.load("scenes-demo", [f"run.rounds={value}"])
