from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from whyidle.errors import UserError
from whyidle.manifest import RECORDING, write_manifest
from whyidle_rules.sources import are_recordings, trace_files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("rank-10.json", "rank-9.json.gz", "rank-1.json", ".hidden.json", "notes.txt"):
        (folder / name).write_text("")
    (folder / "x.json").mkdir()
    return folder


def names(sources: Sequence[str | Path]) -> list[str]:
    return [path.name for path in trace_files([str(source) for source in sources])]


def refused(*sources: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        trace_files([str(source) for source in sources])
    return str(caught.value)


def test_a_folder_is_its_traces_in_the_order_of_ranks(run: Path) -> None:
    assert names([run]) == ["rank-1.json", "rank-9.json.gz", "rank-10.json"]


def test_a_file_is_taken_whatever_it_is_called(run: Path) -> None:
    assert names([run / "notes.txt"]) == ["notes.txt"]


def test_each_file_counts_once(run: Path) -> None:
    assert names([run / "rank-10.json", run, run / "rank-1.json"]) == [
        "rank-10.json",
        "rank-1.json",
        "rank-9.json.gz",
    ]


def test_patterns(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names([run / "rank-?.json*"]) == ["rank-1.json", "rank-9.json.gz"]
    assert names([f"{run.parent}/r*"]) == ["rank-1.json", "rank-9.json.gz", "rank-10.json"]
    monkeypatch.chdir(run)
    assert names(["rank-1[01].json"]) == ["rank-10.json"]
    assert refused(run / "zz*") == f"{run}/zz*: nothing matches it; check the pattern."


def test_a_name_that_looks_like_a_pattern_is_a_name_first(run: Path) -> None:
    (run / "rank-[1].json").write_text("")
    assert names([run / "rank-[1].json"]) == ["rank-[1].json"]


def test_what_is_not_there(run: Path) -> None:
    assert refused(run / "rank_10.json") == (
        f"{run}/rank_10.json: there is no such file or folder; did you mean {run}/rank-10.json?"
    )
    assert refused(run / "quite-another") == (
        f"{run}/quite-another: there is no such file or folder; check the path."
    )
    assert refused(run / "deeper" / "x.json").endswith("check the path.")
    (run / "dead").symlink_to("nowhere")
    assert refused(run / "dead") == f"{run}/dead: the link leads nowhere; name another source."


def test_a_name_that_is_too_long() -> None:
    said = refused("y" * 5000)
    assert said.endswith("name another source.")
    assert "\n" not in said


def test_folders_without_traces(run: Path, tmp_path: Path) -> None:
    assert refused(tmp_path) == (
        f"{tmp_path}: no .json or .json.gz file is in this folder; name one of its folders, such "
        f"as {run}."
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(empty) == (
        f"{empty}: no .json or .json.gz file is in this folder; name another one."
    )


def test_a_folder_that_may_not_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", denied)
    assert refused(run) == f"{run}: permission denied; make it readable or name another."


RECORDED = ["manifest.json", "spool/20250601T120000Z-0000000100000.wsp", "x.duckdb"]


def mark(folder: Path, name: str) -> Path:
    """Make a folder look like a recording by one file alone."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "manifest.json":
        write_manifest(folder, RECORDING, {})
    else:
        path.write_text("")
    return folder


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_is_one_whichever_of_its_files_is_left(name: str, tmp_path: Path) -> None:
    assert are_recordings([str(mark(tmp_path / "recording", name))])


def test_traces_are_no_recording(run: Path) -> None:
    assert not are_recordings([str(run)])
    assert not are_recordings([str(run / "rank-1.json"), f"{run}/*.json"])


def test_a_folder_of_traces_stays_one_beside_a_recording_below_it(run: Path) -> None:
    """A run that was profiled and recorded at once: the traces lie right inside, so they count."""
    mark(run / "node" / "4f2a91c3", "spool/20250601T120000Z-0000000100000.wsp")
    assert not are_recordings([str(run)])
    assert are_recordings([str(run / "node")])


def test_a_manifest_of_ours_outweighs_what_else_lies_there(run: Path) -> None:
    assert are_recordings([str(mark(run, "manifest.json"))])
    (run / "manifest.json").write_text('{"format": "of somebody else"}')
    assert not are_recordings([str(run)])


def test_recordings_and_traces_together_are_refused(run: Path, tmp_path: Path) -> None:
    recording = mark(tmp_path / "recording", "manifest.json")
    with pytest.raises(UserError) as caught:
        are_recordings([str(recording), str(run / "rank-1.json")])
    assert str(caught.value) == (
        f"{run / 'rank-1.json'} is no recording and others are; diagnose traces and recordings "
        "apart."
    )


def test_without_a_source_one_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"^name what to diagnose: "):
        are_recordings([])


@pytest.mark.parametrize("name", ["x.duckdb", "20250601T120000Z-0000000100000.wsp"])
def test_a_part_of_a_recording_is_one(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    assert are_recordings([str(tmp_path / name)])
