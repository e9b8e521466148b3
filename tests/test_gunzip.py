from __future__ import annotations

import gzip
import io
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whyidle_rules.trace import gunzip
from whyidle_rules.trace.gunzip import Gunzip, GunzipError

# Text that compresses well, text that does not, and their mixture.
CHUNKS = st.builds(lambda part, times: part * times, st.binary(max_size=40), st.integers(0, 400))
PLAIN = st.lists(CHUNKS, max_size=3).map(b"".join)


def give_out(packed: bytes, size: int, block: int = 16 << 10) -> tuple[bytes, str]:
    """Return everything that comes out, and what is said at the end."""
    out = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gunzip, "_INPUT_BYTES", block)
        with Gunzip(io.BytesIO(packed)) as file:
            try:
                while part := file.read(size):
                    assert size < 0 or len(part) <= size
                    out.append(part)
            except GunzipError as error:
                return b"".join(out), str(error)
    return b"".join(out), ""


@settings(max_examples=150, deadline=None)
@given(st.lists(PLAIN, min_size=1, max_size=3), st.integers(1, 3000), st.integers(1, 60))
def test_what_was_packed_comes_out(members: list[bytes], size: int, block: int) -> None:
    packed = b"".join(gzip.compress(member, 6) for member in members)
    assert give_out(packed, size, block) == (b"".join(members), "")
    assert give_out(packed, -1, block) == (b"".join(members), "")


@settings(max_examples=60, deadline=None)
@given(PLAIN, st.data(), st.integers(1, 3000), st.integers(1, 60))
def test_everything_before_a_cut_comes_out(
    plain: bytes, data: st.DataObject, size: int, block: int
) -> None:
    packed = gzip.compress(plain, 6)
    end = data.draw(st.integers(1, len(packed) - 1))
    out, said = give_out(packed[:end], size, block)
    assert said == "it is cut off"
    # As much as zlib makes of the same bytes.
    assert out == zlib.decompressobj(31).decompress(packed[:end])
    assert plain.startswith(out)


def test_a_cut_between_members_is_no_cut() -> None:
    first = gzip.compress(b"first" * 100)
    assert give_out(first + gzip.compress(b"second"), 64) == (b"first" * 100 + b"second", "")
    assert give_out(first, 64) == (b"first" * 100, "")


def test_padding_is_passed_over() -> None:
    assert give_out(gzip.compress(b"text") + bytes(2000), 64, 16) == (b"text", "")
    assert give_out(gzip.compress(b"text") + b"rubbish", 64) == (b"text", "")


def test_damage_costs_what_follows_it_and_is_told_again() -> None:
    plain = b"".join(str(n).encode() for n in range(20_000))
    packed = bytearray(gzip.compress(plain))
    at = len(packed) // 2
    packed[at : at + 8] = bytes(byte ^ 0xFF for byte in packed[at : at + 8])
    out, said = give_out(bytes(packed), 1000)
    assert said == "its compression is damaged"
    assert len(out) > 1000
    # Up to the block of input with the damage in it, everything is as it was.
    sound = len(zlib.decompressobj(31).decompress(bytes(packed[: at - at % (16 << 10)])))
    assert out[:sound] == plain[:sound]


def test_a_wrong_checksum_is_damage() -> None:
    packed = bytearray(gzip.compress(b"some text"))
    packed[-6] ^= 1
    assert give_out(bytes(packed), 100)[1] == "its compression is damaged"


def test_a_failure_stays_one() -> None:
    file = Gunzip(io.BytesIO(gzip.compress(b"x" * 1000)[:-9]))
    with pytest.raises(GunzipError, match="it is cut off"):
        while file.read(100):
            pass
    with pytest.raises(GunzipError, match="it is cut off"):
        file.read(1)


def test_closing_it_closes_the_file_beneath() -> None:
    source = io.BytesIO(gzip.compress(b"x"))
    Gunzip(source).close()
    assert source.closed


def test_a_long_file_takes_no_memory_of_its_length() -> None:
    member = gzip.compress(bytes(10_000_000))
    with Gunzip(io.BytesIO(member)) as file:
        assert sum(len(file.read(1 << 16)) for _ in range(153)) == 10_000_000
        assert file.read(1) == b""
