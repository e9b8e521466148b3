"""Exports that may be given away: secrets planted in every column of text are in none of the bytes.

Parquet packs columns, so the bytes are searched twice: as they lie on the disk, and unpacked.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import duckdb
import pytest

from recording_kit import make_row, sample
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect import ALL
from whyidle.collect.collector import Collector
from whyidle.errors import UserError
from whyidle.host import Host
from whyidle.layout import Identity
from whyidle.parquet import export
from whyidle.redact import _BY_NAME, _SPECIAL, KEPT, Redaction
from whyidle.schema import TABLES
from whyidle.spool import SpoolWriter
from whyidle.store import Recording
from whyidle.table import Row, Table, table_of
from whyidle_rules import cli
from world.machine import Machine

SECRET = "hunter2"
NODE = f"node-of-{SECRET}"
IDENTITY = Identity(node=NODE, boot_id=f"{SECRET}-89ab-cdef-0123-456789abcdef")
UUID = "GPU-0badcafe-0bad-4afe-8bad-00000badcafe"
# What a column of a kind of its own might hold; any other column of text gets the bare secret.
PLANTED: dict[tuple[str, str], tuple[str, ...]] = {
    ("process_info", "command"): (
        f"/home/{SECRET}/bin/python3 /data/{SECRET}/train.py --token {SECRET} --x={SECRET}",
        f"torchrun --rdzv-id {SECRET} run.sh",
        f"{SECRET}@host: idle",
        f"python -c import_{SECRET}_things() {SECRET}",
    ),
    ("process_info", "comm"): (SECRET, f"ray::{SECRET}"),
    ("process_info", "cgroup"): (f"/user.slice/{SECRET}.slice", f"/{SECRET}/job_1", f"/{SECRET}"),
    ("mount", "source"): (f"//{SECRET}:{SECRET}@nas/{SECRET}", f"nas:/{SECRET}", f"/dev/{SECRET}"),
    ("mount", "mount_point"): (f"/mnt/{SECRET}", f"/{SECRET}"),
    ("collector_error", "message"): (
        f"cannot read /home/{SECRET}/x: it is {SECRET!r}, not a number",
        f'quota of {SECRET}@host is "{SECRET}"',
        rf"\\{SECRET}\share is gone",
    ),
    ("collector_error", "subject"): (f"/data/{SECRET}", f"{SECRET}/x"),
    ("gpu_event", "text"): (f"refused by /home/{SECRET}/a.out",),
    ("settlement", "failure"): (f"cannot open /var/{SECRET}",),
}


def planted(spec: Table) -> list[dict[str, str]]:
    """Return values of the text columns of rows of a table; None of the kept columns."""
    kept = KEPT.get(spec.name, frozenset())
    names = [c.name for c in spec.columns if c.type == "VARCHAR" and c.name not in kept]
    choices = {
        name: PLANTED.get((spec.name, name), (f"/{SECRET}" if name in _PATHS else SECRET,))
        for name in names
    }
    count = max((len(values) for values in choices.values()), default=0)
    return [
        {name: values[at % len(values)] for name, values in choices.items()} for at in range(count)
    ]


_PATHS = frozenset(("mount_point", "shares_with", "root", "export", "cgroup"))


def written(folder: Path, rows: list[Row]) -> Path:
    """Write rows into a recording of their own."""
    clock = VirtualClock(100 * NS_PER_S)
    spool = SpoolWriter(IDENTITY.folder(folder) / "spool", IDENTITY, clock)
    block: dict[type[Row], list[Row]] = {}
    for row in rows:
        block.setdefault(type(row), []).append(row)
    spool.write(block)
    spool.close()
    return folder


def exported(recording: Path, folder: Path, redaction: Redaction | None) -> Path:
    with Recording([recording]) as opened:
        export(opened, folder, redaction)
    return folder


def everything(folder: Path) -> bytes:
    """All bytes of an export: names of files, contents, and the values unpacked."""
    parts = [str(path.relative_to(folder)).encode() for path in folder.rglob("*")]
    for path in folder.rglob("*"):
        if path.is_file():
            parts.append(path.read_bytes())
        if path.suffix == ".parquet":
            with duckdb.connect() as con:
                found = con.execute("SELECT * FROM read_parquet($1)", [str(path)]).fetchall()
                parts.append(repr(found).encode())
    return b"\n".join(parts)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found: list[Row] = []
    for kind in TABLES:
        spec = table_of(kind)
        found += [make_row(kind, mono_ns=NS_PER_S, **values) for values in planted(spec)]
    return found


def test_secrets_planted_everywhere_are_nowhere(tmp_path: Path, rows: list[Row]) -> None:
    recording = written(tmp_path / "recording", rows)
    plain = exported(recording, tmp_path / "plain", None)
    assert everything(plain).count(SECRET.encode()) > 200, "the search finds what is there"
    hidden = exported(recording, tmp_path / "hidden", Redaction())
    assert SECRET.encode() not in everything(hidden)
    with Recording([hidden]) as opened:
        for kind in TABLES:
            name = table_of(kind).name
            sent = sum(isinstance(row, kind) for row in rows)
            assert opened.con.execute(f'SELECT count(*) FROM "{name}"').fetchone() == (sent,)


def test_every_column_of_text_was_tried(rows: list[Row]) -> None:
    tried = {(type(row).TABLE, c.name) for row in rows for c in table_of(type(row)).columns}
    for kind in TABLES:
        spec = table_of(kind)
        for column in spec.columns:
            if column.type == "VARCHAR" and column.name not in KEPT.get(spec.name, frozenset()):
                assert (spec.name, column.name) in tried


def test_what_is_listed_exists() -> None:
    known = {table_of(kind).name: table_of(kind) for kind in TABLES}
    for table, columns in KEPT.items():
        names = {column.name for column in known[table].columns if column.type == "VARCHAR"}
        assert columns <= names, (table, columns - names)
    for table, column in _SPECIAL:
        known[table].column(column)
    every = {column.name for spec in known.values() for column in spec.columns}
    assert set(_BY_NAME) <= every


def value_of(redaction: Redaction, kind: str, value: object) -> Any:
    expression = getattr(redaction, kind)("v")
    with duckdb.connect() as con:
        found = con.execute(f"SELECT {expression} FROM (SELECT $1 AS v)", [value]).fetchone()
    assert found is not None
    return found[0]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python3 train.py --lr 1", "python3 train.py"),
        ("/opt/venv/bin/python3.11 -u /home/a/b/train.py x", "python3.11 train.py"),
        ("torchrun --nproc-per-node 8 run.sh", "torchrun run.sh"),
        ("train.py", "train.py"),
        ("/usr/bin/nv-hostengine -n", "nv-hostengine"),
        ("sshd: alice@pts/0", ""),
        ("", ""),
        (None, None),
    ],
)
def test_command_lines(command: str | None, shown: str | None) -> None:
    assert value_of(Redaction(), "command", command) == shown


def test_forms() -> None:
    one = Redaction()
    assert value_of(one, "user", 0) == 0
    assert 1_000_000 <= value_of(one, "user", 1000) < 300_000_000
    assert value_of(one, "user", 1000) != value_of(one, "user", 1001)
    assert value_of(one, "user", None) is None
    assert re.fullmatch(
        r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value_of(one, "gpu", UUID)
    )
    assert value_of(one, "gpu", UUID) != UUID
    assert value_of(one, "gpu", "MIG-0badcafe").startswith("MIG-")
    assert value_of(one, "path", "/") == "/"
    assert re.fullmatch(r"/~[0-9a-f]{10}", value_of(one, "path", "/mnt/data"))
    assert value_of(one, "source", "/dev/nvme0n1p2") == "/dev/nvme0n1p2"
    assert value_of(one, "source", "tmpfs") == "tmpfs"
    assert value_of(one, "source", "nas:/export").startswith("source-")
    assert re.fullmatch(r"/slurm/~[0-9a-f]{10}", value_of(one, "cgroup", "/slurm/uid_1/job_2"))
    assert value_of(one, "cgroup", "") == ""
    assert value_of(one, "address", "0000:1a:00.0") == "0000:1a:00.0"
    assert value_of(one, "address", "10.0.0.7").startswith("address-")
    assert value_of(one, "program", "pt_data_worker") == "pt_data_worker"
    assert value_of(one, "program", "alices_tool").startswith("program-")
    assert value_of(one, "phase", "checkpoint_save") == "checkpoint_save"
    assert value_of(one, "phase", "alices phase").startswith("phase-")
    assert value_of(one, "number", "12") == "12"
    text = "NVML PowerUsage: Insufficient Permissions (4)"
    assert value_of(one, "said", text) == text
    assert value_of(one, "said", f"{UUID} PowerUsage") == "... PowerUsage"
    assert value_of(one, "said", "no answer from 10.1.2.3:4420") == "no answer from ..."


def test_one_name_is_one_pseudonym_in_an_export_and_another_in_the_next() -> None:
    one, two = Redaction(), Redaction()
    assert value_of(one, "path", "/mnt/a") == value_of(one, "path", "/mnt/a")
    assert value_of(one, "path", "/mnt/a") != value_of(two, "path", "/mnt/a")
    assert one.salt not in repr(one)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    clock = VirtualClock(100 * NS_PER_S)
    machine = Machine(5, clock=clock)
    hosts: dict[Collector, Host] = dict.fromkeys(ALL, machine)
    sample(folder, ALL, hosts.__getitem__, machine, clock, 20)
    return folder


def test_rows_that_belong_together_still_do(recording: Path, tmp_path: Path) -> None:
    query = (
        "SELECT p.pid, p.kind, i.rank, g.memory_bytes, a.gr_active_ratio FROM process p"
        " JOIN process_info i USING (node, boot_id, pid, start_ns)"
        " JOIN gpu_process g USING (node, boot_id, pid)"
        " JOIN gpu_activity a ON (a.node, a.boot_id, a.uuid) = (g.node, g.boot_id, g.uuid)"
        " ORDER BY ALL LIMIT 500"
    )
    hidden = exported(recording, tmp_path / "hidden", Redaction())
    with Recording([recording]) as before, Recording([hidden]) as after:
        expected = before.con.execute(query).fetchall()
        assert len(expected) == 500
        assert after.con.execute(query).fetchall() == expected
        # Levels of a cgroup and their quotas too.
        joined = "SELECT count(*) FROM process_info JOIN cgroup_cpu USING (node, boot_id, cgroup)"
        assert after.con.execute(joined).fetchone() == before.con.execute(joined).fetchone()


def test_the_manifest_says_so(recording: Path, tmp_path: Path) -> None:
    for redaction in (None, Redaction()):
        folder = exported(recording, tmp_path / str(redaction is None), redaction)
        said = (folder / "manifest.json").read_text()
        assert f'"redacted": {str(redaction is not None).lower()}' in said


def test_an_export_holds_no_journal(recording: Path, tmp_path: Path) -> None:
    (recording / "sim0").mkdir(exist_ok=True)
    (recording / "sim0" / "journal.jsonl.gz").write_bytes(SECRET.encode())
    folder = exported(recording, tmp_path / "hidden", None)
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".parquet", ".json"}
    assert SECRET.encode() not in everything(folder)


def test_a_folder_in_use_is_refused(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="is not empty"):
        exported(recording, tmp_path, Redaction())


def test_the_diagnosis_stays(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = exported(recording, tmp_path / "hidden", Redaction())
    found = []
    for source in (recording, hidden):
        assert cli.diagnose_main(["--json", str(source)]) in (0, 1)
        said = json.loads(capsys.readouterr().out)
        assert said["totals"]["gpu_s"] > 10
        found.append((said["totals"], said["ledger"], said["root_causes"]))
        nodes = {root.pop("node", None) for root in said["root_causes"]}
        assert source is recording or "sim0" not in nodes
        for row in said["ledger"]:
            row["root"].pop("node", None)
    assert found[0] == found[1]
