from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from whyidle.errors import UserError
from whyidle_rules.sources import trace_files


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


@pytest.mark.parametrize(
    "mark", ["manifest.json", "spool", "20250601T120000Z-0000000100000.duckdb"]
)
def test_recordings_are_refused(mark: str, run: Path) -> None:
    (run / mark).write_text("")
    assert refused(run).startswith(f"{run}: this is a recording, and diagnose reads only ")
