"""The service under a real systemd: started, hung, reloaded, released, stopped.

It boots systemd in namespaces of its own, with the units as they are installed. What every check
of a change needs runs always, a minute of it; the rest are slow tests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service_kit import wait_for
from systemd_machine import Booted, booted, why_not

pytestmark = pytest.mark.skipif(why_not() != "", reason=why_not() or "-")

AGENT, KEEPER = "whyidle-agent", "whyidle-keeper"
_PTRACE, _SEARCH, _SYSLOG = 19, 2, 34  # bits of capabilities, linux/capability.h


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    with booted(tmp_path_factory.mktemp("boot")) as one:
        yield one


@pytest.fixture
def running(machine: Booted) -> Iterator[Booted]:
    """The machine with the agent running, whatever the test before did."""
    machine.run("rm -f /etc/whyidle/agent.yaml; systemctl daemon-reload")
    machine.run(f"systemctl start {AGENT}")
    yield machine
    machine.run(f"systemctl stop {AGENT}; systemctl reset-failed", check=False)


def status(machine: Booted, pid: int) -> dict[str, str]:
    lines = machine.run(f"cat /proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def ask(machine: Booted, query: str) -> object:
    """Return the first value of a query over the recording."""
    script = (
        "import json, sys\n"
        "from whyidle.store import Recording\n"
        "with Recording(['/var/lib/whyidle']) as opened:\n"
        "    assert opened.damaged == [], opened.damaged\n"
        f"    print(json.dumps(opened.con.execute({query!r}).fetchone()[0]))\n"
    )
    return json.loads(machine.python(script))


def test_the_units_are_good(machine: Booted) -> None:
    said = machine.run(f"systemd-analyze verify {AGENT}.service {KEEPER}.service 2>&1")
    assert said == ""


def test_it_is_ready_in_seconds_and_not_before_it_records(machine: Booted) -> None:
    begun = time.monotonic()
    machine.run(f"systemctl start {AGENT}")
    assert time.monotonic() - begun < 15
    for unit, said in (
        (AGENT, "recording into /var/lib/whyidle"),
        (KEEPER, "writing segments of /var/lib/whyidle"),
    ):
        assert machine.show(unit, "ActiveState") == "active"
        assert machine.show(unit, "StatusText") == said
        assert machine.show(unit, "NRestarts") == "0"
    assert machine.run("ls /var/lib/whyidle/whyidle-test/*/spool/*.wsp")
    assert machine.run("systemctl is-active run-whyidle-probe.mount") == "active\n"
    served = "whyidle keeper: metrics are served on 127.0.0.1:19836"
    wait_for(lambda: served in machine.journal(KEEPER))


def test_it_has_the_privileges_it_says_and_no_more(running: Booted) -> None:
    bits = f"{1 << _PTRACE | 1 << _SEARCH | 1 << _SYSLOG:016x}"
    for unit, wanted in ((AGENT, bits), (KEEPER, "0" * 16)):
        for pid in running.children(unit):
            said = status(running, pid)
            assert {said[f"Cap{kind}"] for kind in ("Prm", "Eff", "Bnd", "Amb")} == {wanted}
            assert (said["NoNewPrivs"], said["Seccomp"]) == ("1", "2")
            assert running.run(f"stat -c %U /proc/{pid}").strip() == "whyidle"
    stats = [running.run(f"cat /proc/{running.children(unit)[1]}/stat") for unit in (AGENT, KEEPER)]
    # Of what follows the name in parentheses, the 17th is the niceness (proc(5)).
    assert [int(text.rpartition(")")[2].split()[16]) for text in stats] == [0, 10]
    path = running.run(f"cat /proc/{running.children(KEEPER)[0]}/cgroup")
    assert f"/system.slice/{KEEPER}.service" in path


@pytest.mark.slow
def test_the_keeper_has_a_quarter_of_a_core(running: Booted) -> None:
    script = (
        "import pathlib\n"
        f"for top in ('cpu', '.'):\n"
        f"    folder = pathlib.Path('/sys/fs/cgroup', top, 'system.slice/{KEEPER}.service')\n"
        "    for name in ('cpu.cfs_quota_us', 'cpu.max'):\n"
        "        if (folder / name).exists():\n"
        "            print((folder / name).read_text().split()[0])\n"
    )
    said = running.python(script).split()
    if not said:
        pytest.fail("the controller of CPUs is not there")
    assert said[0] == "25000"


def test_gpu_devices_are_open_to_it_and_others_are_not(running: Booted) -> None:
    """A device that is allowed has no driver here: ENXIO. One that is not allowed: EPERM."""
    nodes = {
        "nvidiactl": (195, 255),
        "nvidia0": (195, 0),
        "nvidia15": (195, 15),
        "other": (195, 99),
    }
    for name, (major, minor) in nodes.items():
        running.run(f"test -e /dev/{name} || mknod -m 666 /dev/{name} c {major} {minor}")
    pid = running.children(AGENT)[0]
    enter = (
        f"c=$(sed -n 's/^[0-9]*:devices://p; s/^0:://p' /proc/{pid}/cgroup | head -1); "
        "for d in /sys/fs/cgroup/devices$c /sys/fs/cgroup$c; do "
        "[ -e $d/cgroup.procs ] && echo $$ > $d/cgroup.procs && break; done; "
    )
    found = {
        name: "not permitted" not in running.run(f"{enter} head -c0 /dev/{name} 2>&1", check=False)
        for name in (*nodes, "kmsg")
    }
    assert found == {**dict.fromkeys(nodes, True), "other": False, "kmsg": True}


@pytest.mark.slow
def test_names_of_drivers_may_have_patterns(machine: Booted) -> None:
    """As in DeviceAllow=char-nvidia*: tried with `ptm`, a name of /proc/devices that is here."""
    machine.run("test -e /dev/named || mknod -m 666 /dev/named c 128 0")
    allowed = "systemd-run -q --pipe --wait -p DevicePolicy=strict -p 'DeviceAllow={} rw' "
    said = [
        machine.run(allowed.format(pattern) + "head -c0 /dev/named", check=False)
        for pattern in ("char-p?m", "char-pt*", "char-q*")
    ]
    assert ["Operation not permitted" in text for text in said] == [False, False, True]


@pytest.mark.slow
def test_anybody_may_publish_pages_and_nobody_removes_those_of_others(running: Booted) -> None:
    alice = "setpriv --reuid 1001 --regid 1001 --clear-groups"
    bob = "setpriv --reuid 1002 --regid 1002 --clear-groups"
    page = "/run/whyidle/probe/a.page"
    running.run(f"{alice} touch {page}")
    assert running.try_(f"{bob} rm -f {page}").returncode != 0
    (mount,) = running.run("grep ' /run/whyidle/probe ' /proc/mounts").splitlines()
    assert {"nosuid", "nodev", "noexec"} <= set(mount.split()[3].split(","))
    # What fills it fails, and takes nothing from others.
    assert running.try_(f"{alice} fallocate -l 64M {page}").returncode != 0
    running.run(f"rm {page}")


def test_a_bad_file_is_refused_at_reload_and_a_good_one_taken(running: Booted) -> None:
    before = [running.children(unit) for unit in (AGENT, KEEPER)]
    running.run("echo 'keep: {dais: 3}' > /etc/whyidle/agent.yaml")
    assert running.try_(f"systemctl reload {AGENT}").returncode != 0
    why = "/etc/whyidle/agent.yaml:1:8: there is no setting `keep.dais`; did you mean `keep.days`?"
    assert why in running.journal(AGENT)
    assert [running.children(unit) for unit in (AGENT, KEEPER)] == before
    # Told by its signal alone, the agent looks itself.
    running.run(f"systemctl kill -s HUP --kill-who=main {AGENT}")
    wait_for(lambda: "the old configuration stays" in running.show(AGENT, "StatusText"))
    errors = running.journal(AGENT, "-p err")
    assert f"whyidle agent: the old configuration stays: {why}" in errors
    assert running.children(AGENT) == before[0]

    running.run("echo 'keep: {days: 3}' > /etc/whyidle/agent.yaml")
    running.run(f"systemctl reload {AGENT}")
    wait_for(lambda: running.children(KEEPER)[1:] not in ([], before[1][1:]))
    words = running.run(f"tr '\\0' ' ' < /proc/{running.children(KEEPER)[1]}/cmdline")
    assert "--retain-s 259200.0" in words
    assert running.children(AGENT) == before[0]
    assert running.children(KEEPER)[0] == before[1][0]
    wait_for(lambda: running.show(AGENT, "StatusText").startswith("recording into"))


@pytest.mark.slow
def test_a_configuration_that_is_bad_at_the_start_is_not_tried_again(machine: Booted) -> None:
    machine.run(f"systemctl stop {AGENT}")
    machine.run("echo 'keep: {dais: 3}' > /etc/whyidle/agent.yaml")
    assert machine.try_(f"systemctl start {AGENT}").returncode != 0
    time.sleep(1)
    assert machine.show(AGENT, "ActiveState") == "failed"
    assert machine.show(AGENT, "ExecMainStatus") == "2"
    machine.run(f"rm /etc/whyidle/agent.yaml; systemctl stop {AGENT}; systemctl reset-failed")


@pytest.mark.slow
def test_what_hangs_is_started_again_by_the_watchdog(running: Booted) -> None:
    sampler = running.children(AGENT)[1]
    running.run(f"kill -STOP {sampler}")
    begun = time.monotonic()
    # 10 s until it counts as hung, 20 s without food, 5 s until the restart.
    wait_for(lambda: running.show(AGENT, "NRestarts") == "1", 60)
    took = time.monotonic() - begun
    assert 25 < took < 50
    wait_for(lambda: running.show(AGENT, "ActiveState") == "active", 30)
    said = running.journal(AGENT)
    assert any("has not told of its loop for 10 s" in line for line in said)
    assert any("watchdog timeout" in line.lower() for line in running.journal(AGENT))
    assert running.try_(f"test -e /proc/{sampler}").returncode != 0
    time.sleep(2.5)
    newest = ask(running, "SELECT max(mono_ns) / 1e9 FROM clock")
    assert isinstance(newest, float)
    assert time.monotonic() - newest < 2.5
    assert running.show(KEEPER, "NRestarts") == "0"


@pytest.mark.slow
def test_the_gpus_are_let_go_by_root_and_by_nobody_else(running: Booted) -> None:
    nobody = "setpriv --reuid 1001 --regid 1001 --clear-groups "
    done = running.try_(nobody + "whyidle release")
    assert done.returncode == 2
    assert done.stdout.endswith("Permission denied; run this as root or as the user of the agent\n")
    before = running.children(AGENT)[1]
    assert running.run("whyidle release").startswith("the agent has let go of the GPUs")
    assert running.children(AGENT)[1] != before
    assert "released for driver work" in running.show(AGENT, "StatusText")
    # Also over a restart; only a boot or --resume forgets it.
    running.run(f"systemctl restart {AGENT}")
    words = running.run(f"tr '\\0' ' ' < /proc/{running.children(AGENT)[1]}/cmdline")
    assert words.endswith("--no-gpus ")
    assert running.run("whyidle release --resume") == "the agent has taken the GPUs back.\n"


@pytest.mark.slow
def test_the_gpus_are_taken_back_when_the_driver_was_loaded_anew(machine: Booted) -> None:
    """The driver's file in /proc is one that the test makes and removes."""
    version = "/run/driver/nvidia/version"
    unit = f"/run/systemd/system/{AGENT}.service.d"
    machine.run(f"mkdir -p /run/driver/nvidia {unit}; echo 1 > {version}")
    drop_in = "[Service]\nBindReadOnlyPaths=/run/driver:/proc/driver\n"
    machine.run(f"cat > {unit}/driver.conf; systemctl daemon-reload", stdin=drop_in)
    machine.run(f"systemctl start {AGENT}")
    machine.run("whyidle release")
    released = machine.children(AGENT)[1]
    time.sleep(2.5)
    assert machine.children(AGENT)[1] == released  # the old driver is still there
    machine.run(f"rm {version}")
    time.sleep(2.5)
    assert machine.children(AGENT)[1] == released
    machine.run(f"echo 2 > {version}")
    wait_for(lambda: machine.children(AGENT)[1:] not in ([], [released]), 10)
    words = machine.run(f"tr '\\0' ' ' < /proc/{machine.children(AGENT)[1]}/cmdline")
    assert "--no-gpus" not in words
    assert machine.run("find /var/lib/whyidle -name .release") == ""
    assert "whyidle agent: the driver is back" in machine.journal(AGENT)
    machine.run(f"systemctl stop {AGENT}; rm -r {unit}; systemctl daemon-reload")


def test_it_stops_in_seconds_and_loses_nothing(running: Booted) -> None:
    time.sleep(2)
    asked = time.monotonic()
    running.run(f"systemctl stop {AGENT}")
    # The keeper is stopped with it, behind it.
    wait_for(lambda: running.show(KEEPER, "ActiveState") == "inactive")
    assert time.monotonic() - asked < 5
    for unit in (AGENT, KEEPER):
        assert running.show(unit, "ActiveState") == "inactive"
        assert running.show(unit, "Result") == "success"
    assert running.run("find /var/lib/whyidle -name '*.wsp'") == ""
    newest = ask(running, "SELECT max(began_ns) / 1e9 FROM tick")
    assert isinstance(newest, float)
    # The fast lane samples every eighth of a second until it is told to stop.
    assert asked - newest < 0.3
    last_piece = (
        "SELECT max(gap) FROM (SELECT began_ns - lag(began_ns) OVER (ORDER BY began_ns) AS "
    )
    gap = ask(running, f"{last_piece} gap FROM tick WHERE began_ns > {int((asked - 2) * 1e9)})")
    assert isinstance(gap, int)
    assert gap < 0.3e9


_ALL = "CAP_SYS_PTRACE CAP_DAC_READ_SEARCH CAP_SYSLOG"
CAPABILITIES = {
    "": {"xid", "io", "wait_channel", "net_namespace", "open_files"},
    "CAP_SYS_PTRACE": {"xid", "io", "open_files"},
    "CAP_DAC_READ_SEARCH": {"xid", "io", "wait_channel", "net_namespace", "open_files"},
    "CAP_SYS_PTRACE CAP_DAC_READ_SEARCH": {"xid"},
    "CAP_SYSLOG": {"io", "wait_channel", "net_namespace", "open_files"},
    _ALL: set[str](),
}

_SEE = Path(__file__).with_name("systemd_see.py").read_text()


@pytest.mark.parametrize(
    "granted",
    [
        pytest.param(granted, marks=() if granted in ("", _ALL) else pytest.mark.slow)
        for granted in CAPABILITIES
    ],
)
def test_what_is_lost_without_a_capability(machine: Booted, granted: str) -> None:
    restricted = machine.run("cat /proc/sys/kernel/dmesg_restrict").strip() == "1"
    trainer = (
        "setpriv --reuid 1001 --regid 1001 --clear-groups bash -c "
        "'exec 5</usr/bin/env; exec sleep 60' >/dev/null 2>&1 & echo $!"
    )
    pid = machine.run(trainer).strip()
    machine.run("cat > /run/see.py", stdin=_SEE)
    said = machine.run(
        f"systemd-run -q --uid=whyidle --pipe --wait -p 'AmbientCapabilities={granted}' "
        f"-p 'CapabilityBoundingSet={granted}' -p NoNewPrivileges=yes "
        "-p Environment=LD_LIBRARY_PATH=/opt/python/lib "
        f"/opt/whyidle/bin/python /run/see.py {pid}"
    )
    machine.run(f"kill {pid}")
    wanted = CAPABILITIES[granted] - (set() if restricted else {"xid"})
    assert set(json.loads(said)) == wanted
