from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from whyidle import strict_yaml
from whyidle_rules.rule_yaml import MAX_BYTES, RuleError, YamlNode, parse_yaml, place, read_text

WRONG = [
    ("a: 1\nb: 2\na: 3", "f.yaml:3:1: `a` is given twice"),
    ("a: {b: 1, b: 2}", "f.yaml:1:11: `b` is given twice"),
    ("a: &x 1", "f.yaml:1:4: anchors and aliases are not allowed"),
    ("a: 1\nb: *a", "f.yaml:2:4: anchors and aliases are not allowed"),
    ("a: !!python/object/apply:os.system [x]", "f.yaml:1:4: tags are not allowed"),
    ("a: !!str 1", "f.yaml:1:4: tags are not allowed"),
    ("a: 1\n---\nb: 2", "f.yaml:2:1: a file holds one rule"),
    ("? [a]\n: 1", "f.yaml:1:3: a key has to be a plain word"),
    ("a: " + "{a: " * 20 + "1" + "}" * 20, "nested more than 16 deep"),
    ("- " * 20 + "a", "nested more than 16 deep"),
    ("", "f.yaml:1:1: the file is empty"),
    ("# only a comment\n", "f.yaml:1:1: the file is empty"),
    ("a: b: c", "f.yaml:1:5: this is not YAML"),
    ("a:\n\tb: 1", "f.yaml:2:1: this is not YAML"),
    ("a: 'x", "this is not YAML"),
    ("a: \x07", "f.yaml:1:1: this is not YAML: it holds characters that YAML forbids"),
    ("[" * 60_000, "f.yaml:1:"),
    ("? " * 30_000, "f.yaml:1:"),
]


@pytest.fixture(params=["libyaml", "python"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(strict_yaml, "_LOADER", yaml.SafeLoader)
    elif not yaml.__with_libyaml__:
        pytest.skip("PyYAML was built without libyaml")
    return str(request.param)


@pytest.mark.parametrize(("text", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_not_strict_yaml_is_refused_where_it_stands(
    text: str, message: str, loader: str
) -> None:
    with pytest.raises(RuleError) as caught:
        parse_yaml(text, "f.yaml")
    assert message in str(caught.value) or (
        loader == "python" and "nested more" in str(caught.value)
    )
    assert "\n" not in str(caught.value)


def test_scalars_stay_the_text_that_was_written(loader: str) -> None:
    root = parse_yaml("a: no\nb: 1:30\nc: 012\nd: ~\ne: 'no'\nf: plain words\ng: 5", "f.yaml")
    values = {key.text: value for key, value in root.pairs}
    assert [value.text for value in values.values()] == [
        "no",
        "1:30",
        "012",
        "~",
        "no",
        "plain words",
        "5",
    ]
    assert {name for name, value in values.items() if value.reads_as_text} == {"e", "f"}


SOURCES = [
    ("é: x\na: >-\n  foo +\n  bär * baz\nc: 1", (4, 9)),
    ("é: x\na: |\n  foo +\n   bär * baz\nc: 1", (4, 10)),
    ("é: x\na: foo +\n  bär * baz\nc: 1", (3, 9)),
    ("é: x\na: 'foo + bär * baz'\nc: 1", (2, 17)),
    ('é: x\na: "foo + bär * baz"\nc: 1', (2, 17)),
    ("é: x\na:   foo + bär * baz\nc: 1", (2, 18)),
    ("é: x\n# a: baz\na: baz # baz\nc: 1", (3, 4)),
]


@pytest.mark.parametrize(("source", "expected"), SOURCES)
def test_a_character_of_a_scalar_is_found_in_the_file(
    source: str, expected: tuple[int, int], loader: str
) -> None:
    node = parse_yaml(source, "f.yaml").pairs[1][1]
    assert place(source, node, node.text.index("baz")) == expected


def test_the_end_of_a_scalar_is_behind_its_last_character(loader: str) -> None:
    source = "a: foo +   # more\nb: 1"
    node = parse_yaml(source, "f.yaml").pairs[0][1]
    assert place(source, node, len(node.text)) == (1, 9)
    source = "a:\nb: 1"
    node = parse_yaml(source, "f.yaml").pairs[0][1]
    assert place(source, node, 0) == (node.line, node.column)


def test_a_file_that_is_too_big_or_no_text_is_refused(tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * MAX_BYTES)
    assert len(read_text(big)) == MAX_BYTES
    big.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(RuleError, match=r"big\.yaml: a rule file has at most 64 KiB; split it"):
        read_text(big)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: 1\nb: \xff\xfe")
    with pytest.raises(RuleError, match=r"binary\.yaml:2:1: this is not UTF-8 text"):
        read_text(binary)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)  # opening it for reading would wait for a writer
    with pytest.raises(RuleError, match="not a regular file"):
        read_text(fifo)
    with pytest.raises(RuleError, match="not a regular file"):
        read_text(tmp_path / "missing.yaml")


def test_messages_hold_no_control_characters() -> None:
    with pytest.raises(RuleError) as caught:
        parse_yaml('{"\\e[31m": 1, "\\e[31m": 2}', "f\x1b.yaml")
    assert str(caught.value) == "f?.yaml:1:15: `?[31m` is given twice"


def test_an_empty_sequence_and_mapping_are_themselves() -> None:
    root = parse_yaml("a: []\nb: {}", "f.yaml")
    kinds = [(value.kind, value.items, value.pairs) for _, value in root.pairs]
    assert kinds == [("sequence", (), ()), ("mapping", (), ())]
    assert isinstance(root, YamlNode)
