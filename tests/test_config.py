"""Settings: the file, the environment, the command line, and what is refused where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whyidle.config import Config, settings
from whyidle.config_doc import example, in_effect, markdown
from whyidle.config_load import load
from whyidle.strict_yaml import ProblemsError, parse_yaml

ROOT = Path(__file__).parents[1]

EVERYTHING = """\
recording: /data/whyidle
node: n-1.cluster
journal: true
probe:
  folders: [/run/a, /run/b]
collectors: {without: [vmstat, net_link]}
dcgm: {url: "http://localhost:9400/metrics"}
keep: {days: 3, gb: 2.5, free_gb: 20}
metrics:
  listen: '[::]:9'
  web_config: /etc/whyidle/web.yaml
  textfile: /var/lib/node_exporter/whyidle.prom
  subcause: true
  job: true
rules: {dirs: [/opt/rules], settle: false}
ledger: {keep_days: 30, keep_gb: 0.5}
"""


def loaded(folder: Path, text: str, **environ: str) -> Config:
    file = folder / "agent.yaml"
    file.write_text(text)
    return load(file, environ).config


def problems(folder: Path, text: str, **environ: str) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        loaded(folder, text, **environ)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def test_no_file_is_needed(tmp_path: Path) -> None:
    got = load(environ={}, default=tmp_path / "nothing.yaml")
    assert (got.config, got.file, got.sources) == (Config(), None, {})


def test_every_setting_can_be_set(tmp_path: Path) -> None:
    config = loaded(tmp_path, EVERYTHING)
    assert {
        name for name in settings() if getattr(config, name) == getattr(Config(), name)
    } == set()
    assert config.sampler == (
        "--journal",
        *("--probe-dir", "/run/a", "--probe-dir", "/run/b"),
        *("--without", "vmstat", "--without", "net_link"),
        *("--dcgm-url", "http://localhost:9400/metrics"),
    )
    assert config.retention == (
        *("--retain-s", "259200.0", "--retain-bytes", "2500000000"),
        *("--free-bytes", "20000000000"),
    )
    assert config.evaluation == (
        *("--metrics-listen", "[::]:9", "--metrics-web-config", "/etc/whyidle/web.yaml"),
        *("--metrics-textfile", "/var/lib/node_exporter/whyidle.prom"),
        *("--metrics-subcause", "--metrics-job", "--rules-dir", "/opt/rules", "--no-settle"),
        *("--ledger-retain-s", "2592000.0", "--ledger-retain-bytes", "500000000"),
    )


def test_what_is_off_is_not_passed_on(tmp_path: Path) -> None:
    config = loaded(tmp_path, "metrics: {listen: off}")
    assert config.metrics_listen is None
    assert "--metrics-listen" not in config.evaluation
    assert Config().evaluation[:2] == ("--metrics-listen", "127.0.0.1:19836")
    assert Config().sampler == ()
    assert loaded(tmp_path, "metrics: {listen: ':80'}").metrics_listen == ":80"


@pytest.mark.parametrize("text", ["", "# nothing\n\n", "node:", "node: ~\nkeep: null\nprobe:\n"])
def test_nothing_stands_for_the_default(tmp_path: Path, text: str) -> None:
    assert loaded(tmp_path, text) == Config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keep: {day: 3}", "1:8: there is no setting `keep.day`; did you mean `keep.days`?"),
        ("kept: {days: 3}", "1:1: there is no setting `kept`; did you mean `keep`?"),
        ("days: 3", "1:1: there is no setting `days`; did you mean `keep.days`?"),
        ("keep:\n  listen: a", "2:3: there is no setting `keep.listen`; did you mean"),
        ("rules: {qqq: 1}", "1:9: there is no setting `rules.qqq`; here can stand `rules.dirs`, "),
        ("keep: 3", "1:7: `keep` has to be a mapping of settings"),
        ("- node", "1:1: the configuration has to be a mapping of settings"),
        ("keep.days: 1\nkeep: {days: 2}", "2:8: `keep.days` is given twice"),
        ("node: a\nnode: b", "2:1: `node` is given twice"),
        ("keep: {days: 0}", "1:14: `keep.days` has to be a positive number, not '0'"),
        ("keep: {days: -1}", "1:14: `keep.days` has to be a positive number, not '-1'"),
        ("keep: {days: .inf}", "1:14: `keep.days` has to be a positive number, not '.inf'"),
        ("keep: {days: 1:30}", "1:14: `keep.days` has to be a positive number, not '1:30'"),
        ("keep: {days: '3'}", "1:14: `keep.days` has to be a positive number, without quotes"),
        ("keep: {days: [3]}", "1:14: `keep.days` has to be a positive number"),
        ("journal: yes", "1:10: `journal` has to be true or false, not 'yes'"),
        ("recording: data", "1:12: `recording` has to be a path from /, not 'data'"),
        ("node: a/b", "1:7: `node` has to be of letters, digits, dots, dashes and underscores"),
        ("probe: {folders: /run/a}", "1:18: `probe.folders` has to be a list of folders"),
        ("probe: {folders: [run]}", "1:18: `probe.folders` has to be a path from /, not 'run'"),
        ("probe: {folders: [~]}", "1:18: `probe.folders` has to be folders, as paths from /"),
        ("metrics: {listen: 9836}", "1:19: `metrics.listen` has to be an address and a port"),
        ("metrics: {listen: 'a:65536'}", "1:19: `metrics.listen` has to be an address and a port"),
        ("metrics: {listen: 'a/b:80'}", "1:19: `metrics.listen` has to be an address and a port"),
        ("collectors: {without: [vmstats]}", "1:23: `collectors.without` names no collector"),
        ("dcgm: {url: localhost:9400}", "1:13: `dcgm.url` has to be an address such as http://"),
        ("node: &a b", "1:7: anchors and aliases are not allowed; write the value again"),
        ("node: a\n---\nnode: b", "2:1: a file holds one configuration; put the second one"),
        ("node: [", "2:1: this is not YAML: "),
    ],
)
def test_what_is_not_understood_is_refused_with_its_place(
    tmp_path: Path, text: str, said: str
) -> None:
    (one,) = problems(tmp_path, text)
    assert one.startswith(f"agent.yaml:{said}")


def test_a_collector_that_is_misspelt_is_guessed(tmp_path: Path) -> None:
    (one,) = problems(tmp_path, "collectors: {without: [vmstats]}")
    assert one.endswith("names no collector with 'vmstats'; did you mean vmstat?")


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, "nod: a\njournal: 1\nkeep: {gb: x}", WHYIDLE_KEEP_DAYS="0")
    assert [one.split(" ")[0] for one in found] == [
        "$WHYIDLE_KEEP_DAYS:",
        "agent.yaml:1:1:",
        "agent.yaml:2:10:",
        "agent.yaml:3:12:",
    ]


def test_a_file_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match=r"no\.yaml: there is no such file; name another one"):
        load(tmp_path / "no.yaml", {})
    with pytest.raises(ProblemsError, match="this is not a regular file"):
        load(tmp_path, {})


def test_a_default_file_that_cannot_be_seen_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> None:  # root sees everything
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(ProblemsError, match=r"cannot be read \(Permission denied\); check"):
        load(environ={}, default=tmp_path / "agent.yaml")


def test_the_nearest_word_wins(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("\nkeep: {days: 1, gb: 1, free_gb: 1}\n")
    environ = {"WHYIDLE_KEEP_DAYS": "2", "WHYIDLE_KEEP_GB": "2", "WHYIDLE_NODE": "b"}
    got = load(file, environ, {"keep_days": 3.0})
    assert (got.config.keep_days, got.config.keep_gb, got.config.free_gb) == (3.0, 2.0, 1.0)
    assert got.sources == {
        "keep_days": "command line",
        "keep_gb": "WHYIDLE_KEEP_GB",
        "node": "WHYIDLE_NODE",
        "free_gb": f"{file}:2",
    }


def test_lists_in_the_environment_are_like_path(tmp_path: Path) -> None:
    config = loaded(tmp_path, "probe: {folders: [/c]}", WHYIDLE_PROBE_FOLDERS="/a:/b")
    assert config.probe_folders == (Path("/a"), Path("/b"))


def test_variables_that_are_no_settings_are_told() -> None:
    environ = {"WHYIDLE_KEEP_DAY": "1", "WHYIDLE_PROBE": "1", "HOME": "/", "WHYIDLE_QQQ": ""}
    assert load(environ=environ, default=Path("/no-such-file")).warnings == (
        "$WHYIDLE_KEEP_DAY is no setting; did you mean $WHYIDLE_KEEP_DAYS?",
        "$WHYIDLE_QQQ is no setting",
    )


def test_the_example_has_every_setting_with_its_default(tmp_path: Path) -> None:
    text = example()
    assert loaded(tmp_path, text) == Config()
    # Switched on, it says the same. Of a section's lines, the comments keep their second #.
    switched = "\n".join(
        line[1:]
        for line in text.splitlines()
        if line.startswith("#  ") or (line.startswith("#") and line[1:2].isalpha())
    )
    assert loaded(tmp_path, switched) == Config()
    given = parse_yaml(switched, "example")
    keys = {
        f"{head.text}.{key.text}" if value.kind == "mapping" else head.text
        for head, value in given.pairs
        for key, _ in value.pairs or ((head, value),)
    }
    assert keys == {setting.key for setting in settings().values()}


def test_the_example_is_the_one_that_is_installed() -> None:
    path = ROOT / "systemd" / "agent.yaml"
    if os.environ.get("WHYIDLE_WRITE_DOCS") == "1":
        path.write_text(example(), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == example(), (
        "run: WHYIDLE_WRITE_DOCS=1 .venv/bin/python -m pytest tests/test_config.py"
    )


def test_the_reference_has_a_row_for_every_setting() -> None:
    rows = markdown().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [one.key for one in settings().values()]


def test_what_is_in_effect_says_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("metrics: {listen: off}\nprobe: {folders: [/a, /b]}\n")
    said = {
        line.split()[0]: line.split(maxsplit=1)[1].strip()
        for line in in_effect(load(file, {"WHYIDLE_JOURNAL": "true"})).splitlines()
    }
    assert said["metrics.listen"].split() == ["off", f"{file}:1"]
    assert said["probe.folders"].split() == ["[/a,", "/b]", f"{file}:2"]
    assert said["journal"].split() == ["true", "WHYIDLE_JOURNAL"]
    assert said["keep.days"].split() == ["7", "default"]
