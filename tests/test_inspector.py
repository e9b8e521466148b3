"""Files of NCCL's Inspector plugin. All of them are synthetic: made here, in its format v4.0."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest

from recording_kit import make_row
from recording_rows import Act, clocks, connect, holds, process, s, start_of
from test_recording_ranks import COMPUTES, POLLS, SECONDS, job, rank_rows, sums, uuid_of
from whyidle.errors import UserError
from whyidle.schema import NvLink, ProbeInfo
from whyidle_rules.recording import engine, inspector
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule_load import load_rules

MIB = 1 << 20


def line(
    rank: int, number: int, took_us: float, size: int, *, busbw: float = 100.0, **more: Any
) -> dict[str, Any]:
    """Return what the plugin writes of one collective on one rank of two."""
    return {
        "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": 2, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": 1748030377748202 + number,
            "hostname": "n0.cluster",
            "pid": 100 + rank,
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": number,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": took_us,
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": busbw,
            "coll_busbw_gbs": busbw,
            **more,
        },
    }


def write(folder: Path, lines: Sequence[dict[str, Any]], name: str = "n0-pid100.log") -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def large_and_small() -> list[dict[str, Any]]:
    """Rank 1 comes late to every large collective; a fourth of the moving time is small ones."""
    lines = []
    for number in range(10):
        lines += [line(0, number, 4000, 64 * MIB, busbw=37.5), line(1, number, 3000, 64 * MIB)]
    for number in range(10, 20):
        lines += [line(rank, number, 1000, 1024, busbw=0.001) for rank in (0, 1)]
    return lines


def told(folder: Path, pids: Sequence[int], node: str = "n0") -> inspector.Exact:
    con = duckdb.connect(":memory:")
    inspector.put(con, inspector.read([folder]))
    gpu: Any = type("Gpu", (), {"node": node})
    return inspector.of_gpu(con, gpu, pids)


def test_the_last_to_come_tells_what_the_bytes_took(tmp_path: Path) -> None:
    found = told(write(tmp_path / "dump", large_and_small()), [100])
    assert found.bus_bytes_per_s == pytest.approx(100e9)
    assert found.small_ratio == pytest.approx(10 * 1000 / (10 * 3000 + 10 * 1000))
    assert found.wait_ratio == pytest.approx(10 * 1000 / (10 * 4000 + 10 * 1000))
    assert told(tmp_path / "dump", [101]).wait_ratio == 0
    nobody = told(tmp_path / "dump", [102])
    assert (nobody.bus_bytes_per_s, nobody.small_ratio, nobody.wait_ratio) == (None, None, None)
    elsewhere = told(tmp_path / "dump", [100], node="n1")
    assert elsewhere.bus_bytes_per_s is None


def test_a_collective_of_which_a_rank_is_missing_tells_nothing(tmp_path: Path) -> None:
    found = told(write(tmp_path / "dump", [line(0, 1, 4000, 64 * MIB)]), [100])
    assert (found.bus_bytes_per_s, found.wait_ratio) == (None, None)


def test_packed_files_and_other_records_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    dropped = {"header": line(0, 0, 1, 1)["header"], "dump_stats": {"dropped_total": 3}}
    text = "\n".join(json.dumps(one) for one in (dropped, line(0, 1, 10, 5), line(1, 1, 9, 5)))
    with gzip.open(folder / "n0-pid100.log.gz", "wb") as file:
        file.write(text.encode())
    (folder / "readme.txt").write_text("not one of them")
    found = inspector.read([folder])
    assert len(found.rows) == 2
    assert (found.bad_lines, found.cut) == (0, False)


@pytest.mark.parametrize(
    "bad",
    [
        b"\n{",
        b"\nnull",
        b"\n[1,2]",
        b'\n{"header": 1}',
        b"\n\xff\xfe\x00",
        b"\n" + b"[" * 5000,
        b"\n" + b"x" * (3 * inspector.LINE_BYTES_MOST) + b"\n",
        json.dumps(line(5, 1, 10, 5)).encode(),
        json.dumps(line(0, -1, 10, 5)).encode(),
        json.dumps(line(0, 1, 10, 1 << 70)).encode(),
        json.dumps(line(0, 1, -10, 5)).encode(),
        json.dumps(line(0, 1, 1e300, 5)).encode(),
        json.dumps(line(0, 1, 10, 5, busbw=-1.0)).encode(),
        json.dumps(line(0, 1, 10, 5)).replace("100.0", "NaN").encode(),
    ],
)
def test_a_line_that_is_none_is_counted_and_left_out(tmp_path: Path, bad: bytes) -> None:
    good = json.dumps(line(0, 1, 10, 5)).encode()
    (tmp_path / "a.log").write_bytes(good + b"\n" + bad + b"\n" + good + b"\n")
    found = inspector.read([tmp_path])
    assert len(found.rows) == 2
    assert found.bad_lines == 1
    (said,) = inspector.left_out(found, [tmp_path])
    assert said.why == "1 lines are none of NCCL Inspector's, format v4.0"


def test_spoilt_files_never_raise_anything_else(tmp_path: Path) -> None:
    source = random.Random(7)
    good = "".join(json.dumps(one) + "\n" for one in large_and_small()).encode()
    for number in range(60):
        spoilt = bytearray(good)
        for _ in range(source.randrange(1, 60)):
            spoilt[source.randrange(len(spoilt))] = source.randrange(256)
        path = tmp_path / f"{number}.log"
        path.write_bytes(bytes(spoilt[: source.randrange(1, len(spoilt))]))
        try:
            found = inspector.read([path])
        except UserError:
            continue
        con = duckdb.connect(":memory:")
        inspector.put(con, found)
        assert con.execute(f"SELECT count(*) FROM {inspector.TABLE}").fetchone() == (
            len(found.rows),
        )


def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not there; name the NCCL_INSPECTOR_DUMP_DIR"):
        inspector.read([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no collective"):
        inspector.read([tmp_path / "empty"])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(UserError, match=r"cut\.gz: cannot be read"):
        inspector.read([tmp_path / "cut.gz"])


def test_rows_and_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "dump", large_and_small())
    monkeypatch.setattr(inspector, "ROWS_MOST", 7)
    found = inspector.read([folder])
    assert (len(found.rows), found.cut) == (7, True)
    monkeypatch.setattr(inspector, "ROWS_MOST", 1000)
    monkeypatch.setattr(inspector, "FILE_BYTES_MOST", 2000)
    found = inspector.read([folder])
    assert found.cut
    assert 0 < len(found.rows) < 40
    assert "there are over" in inspector.left_out(found, [folder])[-1].why


def test_evidence_tells_small_collectives_and_bandwidth_of_the_line(tmp_path: Path) -> None:
    """Links of 200 GB/s each way, collectives at 100: half; a fourth of the moving is small."""
    second = [POLLS] * 2 + [COMPUTES] * 6
    more = [*clocks(0, SECONDS)]
    for rank in range(2):
        pid = 100 + rank
        more += [
            make_row(
                NvLink, mono_ns=s(1), uuid=uuid_of(rank), link=0, speed_bytes_per_s=200 * 10**9
            ),
            make_row(
                ProbeInfo, mono_ns=s(0), pid=pid, start_ns=start_of(0.0), inner_pid=pid, rank=rank,
                world_size=2,
            ),
            *holds(pid, uuid=uuid_of(rank), until=SECONDS),
            *process(pid, [(SECONDS, Act(run=0.5))]),
        ]  # fmt: skip
    # Two windows of eight at four times the line's most in a second: all of the spinning moves.
    ranks = [rank_rows(rank, second, nvlink_bytes=20 * 10**9) for rank in range(2)]
    rows = job(*ranks, more=more)
    found = inspector.read([write(tmp_path / "dump", large_and_small())])
    con = connect(rows)
    inspector.put(con, found)
    engine.fill(con)
    small, moved = sums(con, 0, "coll_small_s", "coll_transfer_s")
    assert small is not None and moved is not None
    assert small == pytest.approx((small + moved) / 4)
    (ratio,) = con.execute(
        "SELECT DISTINCT coll_line_ratio FROM evidence WHERE coll_transport = 'nvlink'"
    ).fetchall()
    assert ratio[0] == pytest.approx(0.5)
    con = connect(rows)
    inspector.put(con, found)
    diagnosis = diagnose(con, ["x"], load_rules(), spans(con, None, None))
    assert {"small_messages", "transfer_nvlink"} <= {row.subcause for row in diagnosis.ledger}
    (transfer,) = [one for one in diagnosis.findings if one.rule == "transfer_nvlink"]
    assert transfer.says.endswith("Bandwidth meanwhile, of the line rate: 50%.")
    con = connect(rows)
    engine.fill(con)
    assert sums(con, 0, "coll_small_s") == [None]
