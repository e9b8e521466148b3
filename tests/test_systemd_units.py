"""The units as files: systemd takes them, and they are as closed as the documentation says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whyidle.release import PATIENCE_S
from whyidle.supervisor import KEEPER_PATIENCE_S, SAMPLER_PATIENCE_S
from whyidle_rules import cli

ROOT = Path(__file__).parents[1]
SYSTEMD = ROOT / "systemd"
SERVICES = ("whyidle-agent.service", "whyidle-keeper.service")
UNITS = (*SERVICES, "run-whyidle-probe.mount")

analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"
)


def settings(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / unit).read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units with a program that is there in place of `whyidle`."""
    for unit in UNITS:
        text = (SYSTEMD / unit).read_text()
        changed = re.sub(r"(?m)^(Exec\w+=)whyidle ", rf"\1{sys.executable} ", text)
        assert changed != text or unit.endswith(".mount")
        (tmp_path / unit).write_text(changed)
    return tmp_path


@analyze
def test_systemd_finds_nothing_wrong(installed: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", *(str(installed / unit) for unit in UNITS)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    about_ours = [line for line in done.stderr.splitlines() if "whyidle" in line]
    assert (done.returncode, about_ours) == (0, [])


@analyze
@pytest.mark.parametrize("unit", SERVICES)
def test_exposure_is_what_the_documentation_says(unit: str, installed: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(installed / unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (found,) = re.findall(rf"exposure level for {unit}: ([\d.]+)", done.stdout)
    (told,) = re.findall(rf"`{unit}` (\d+\.\d+)", (ROOT / "docs" / "service.md").read_text())
    # Other versions of systemd know more or fewer settings.
    assert float(found) <= float(told) + 0.2, done.stdout


@pytest.mark.parametrize("unit", SERVICES)
def test_what_the_units_call_is_a_command(unit: str) -> None:
    parser = cli.whyidle_parser()
    given = settings(unit)
    for line in (*given["ExecStart"], given["ExecReload"][0]):
        words = line.split()
        assert words[0] == "whyidle"
        parser.parse_args(words[1:])


def test_there_is_time_to_stop() -> None:
    agent, keeper = (settings(unit) for unit in SERVICES)
    assert int(agent["TimeoutStopSec"][0]) > SAMPLER_PATIENCE_S
    assert int(keeper["TimeoutStopSec"][0]) > KEEPER_PATIENCE_S
    assert PATIENCE_S > SAMPLER_PATIENCE_S


def test_every_line_of_the_example_is_off_and_known() -> None:
    lines = (SYSTEMD / "10-example.conf").read_text().splitlines()
    assert all(line.startswith("#") or not line for line in lines)
    names = {match[1] for line in lines if (match := re.fullmatch(r"#([A-Z][A-Za-z]+)=.*", line))}
    known = settings(SERVICES[0]) | settings(SERVICES[1])
    assert names - {"ReadWritePaths", "SupplementaryGroups"} <= set(known) | {"IPAddressDeny"}
    assert {"ReadWritePaths", "SupplementaryGroups", "AmbientCapabilities"} <= names


def test_installing_leaves_settings_alone(tmp_path: Path) -> None:
    subprocess.run([SYSTEMD / "install", str(tmp_path)], check=True, timeout=60)
    for unit in UNITS:
        where = tmp_path / "usr/lib/systemd/system" / unit
        assert where.read_text() == (SYSTEMD / unit).read_text()
        assert where.stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "usr/lib/sysusers.d/whyidle.conf").exists()
    assert (tmp_path / "usr/lib/tmpfiles.d/whyidle.conf").exists()
    mine = tmp_path / "etc/whyidle/agent.yaml"
    assert mine.read_text() == (SYSTEMD / "agent.yaml").read_text()
    mine.write_text("journal: true\n")
    subprocess.run([SYSTEMD / "install", str(tmp_path)], check=True, timeout=60)
    assert mine.read_text() == "journal: true\n"
