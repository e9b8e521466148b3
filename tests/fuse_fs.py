"""A FUSE file system that is late: a folder served through /dev/fuse, each operation after a delay.

    with slow_fs(tmp_path / "mnt", tmp_path / "behind", {"read": 0.05}) as fs:
        (fs.mountpoint / "a").read_bytes()      # 50 ms or more, in D state as on any network mount
        fs.delay(read=0.0, fsync=2.0)           # from now on

Needs root and /dev/fuse. The server is a process of its own. Delays are seconds by operation:
lookup, getattr, open, read, readdir, write, fsync, create. Protocol: linux/fuse.h, 7.31.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import select
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MNT_DETACH = 2
OPERATIONS = ("lookup", "getattr", "open", "read", "readdir", "write", "fsync", "create")
_SERVERS = 16
_WRITE_MAX = 128 << 10
_BUFFER = _WRITE_MAX + 8192
_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_READ = struct.Struct("<QQIIQII")
_OPEN = struct.Struct("<QII")
_SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
_ASYNC_READ, _BIG_WRITES, _PARALLEL_LOOKUPS = 1 << 0, 1 << 5, 1 << 18
_SIZE_VALID, _MODE_VALID = 1 << 3, 1 << 0
_ROOT = 1
_CAP_SYS_ADMIN = 21
Handler = Callable[[int, bytes], bytes]


class Server:
    """Answers for one mount. Nodes are numbered paths; a file handle is a real descriptor."""

    def __init__(self, device: int, behind: Path) -> None:
        self._device, self._behind = device, behind
        self._paths: dict[int, str] = {_ROOT: ""}
        self._numbers: dict[str, int] = {"": _ROOT}
        self._lock = threading.Lock()
        self.delays: dict[str, float] = {}
        self._handlers: dict[int, tuple[str, Handler]] = {
            1: ("lookup", self._lookup),
            3: ("getattr", lambda node, body: self._attributes(node)),
            4: ("", self._set_attributes),
            9: ("create", self._mkdir),
            10: ("", lambda node, body: self._gone(os.unlink, self._child(node, body))),
            11: ("", lambda node, body: self._gone(os.rmdir, self._child(node, body))),
            12: ("", lambda node, body: self._rename(node, body, 8)),
            14: ("open", self._open),
            15: ("read", self._read),
            16: ("write", self._write),
            17: ("", self._statfs),
            18: ("", self._release),
            20: ("fsync", self._fsync),
            25: ("", lambda node, body: b""),
            26: ("", self._init),
            27: ("open", lambda node, body: _OPEN.pack(0, 0, 0)),
            28: ("readdir", self._readdir),
            29: ("", lambda node, body: b""),
            30: ("fsync", lambda node, body: b""),
            35: ("create", self._create),
            45: ("", lambda node, body: self._rename(node, body, 16)),
        }

    def serve(self) -> None:
        """Answers until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._device, _BUFFER)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):  # one was interrupted
                    continue
                return  # ENODEV: unmounted
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            if opcode in (2, 36, 42):  # forget, interrupt, forget many: no answer is wanted
                continue
            name, handler = self._handlers.get(opcode, ("", _unknown))
            if pause := self.delays.get(name, 0.0):
                time.sleep(pause)
            code, answer = 0, b""
            try:
                answer = handler(node, request[_IN.size :])
            except OSError as error:
                code = -(error.errno or errno.EIO)
            with suppress(OSError):  # who asked has gone
                os.write(self._device, _OUT.pack(_OUT.size + len(answer), code, unique) + answer)

    def _path(self, node: int) -> Path:
        return self._behind / self._paths[node]

    def _child(self, node: int, body: bytes) -> str:
        return os.path.join(self._paths[node], os.fsdecode(body.rstrip(b"\0")))  # noqa: PTH118

    def _number(self, path: str) -> int:
        with self._lock:
            number = self._numbers.setdefault(path, len(self._paths) + 1)
            self._paths[number] = path
            return number

    def _entry(self, path: str) -> bytes:
        packed = _attr(os.lstat(self._behind / path), number := self._number(path))
        return _ENTRY.pack(number, 0, 0, 0, 0, 0) + packed

    def _init(self, node: int, body: bytes) -> bytes:
        _, minor, readahead, _ = struct.unpack_from("<4I", body)
        flags = _ASYNC_READ | _BIG_WRITES | _PARALLEL_LOOKUPS
        return struct.pack(
            "<4I2H2I2HI7I",
            7,
            min(minor, 31),
            readahead,
            flags,
            64,
            48,
            _WRITE_MAX,
            1,
            32,
            0,
            *[0] * 8,
        )

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._child(node, body))

    def _attributes(self, node: int) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + _attr(self._path(node).lstat(), node)

    def _set_attributes(self, node: int, body: bytes) -> bytes:
        values = _SETATTR.unpack_from(body)
        if values[0] & _SIZE_VALID:
            os.truncate(self._path(node), values[3])
        if values[0] & _MODE_VALID:
            self._path(node).chmod(stat.S_IMODE(values[11]))
        return self._attributes(node)

    def _mkdir(self, node: int, body: bytes) -> bytes:
        (self._behind / (path := self._child(node, body[8:]))).mkdir()
        return self._entry(path)

    def _gone(self, remove: Callable[[Path], None], path: str) -> bytes:
        remove(self._behind / path)
        self._forget(path)
        return b""

    def _forget(self, path: str) -> None:
        # A name that comes again is another file; handles of the old one stay good.
        with self._lock:
            self._numbers.pop(path, None)

    def _rename(self, node: int, body: bytes, skip: int) -> bytes:
        (to,) = struct.unpack_from("<Q", body)
        old, new = body[skip:].split(b"\0")[:2]
        source, target = self._child(node, old), self._child(to, new)
        os.rename(self._behind / source, self._behind / target)  # noqa: PTH104
        self._forget(target)
        with self._lock:
            number = self._numbers.pop(source, None)
            if number is not None:
                self._numbers[target], self._paths[number] = number, target
        return b""

    def _open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        flags &= os.O_ACCMODE | os.O_TRUNC
        # No flag to keep the page cache: every open reads anew, as clients with a small cache do.
        return _OPEN.pack(os.open(self._path(node), flags), 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        _, mode, umask, _ = struct.unpack_from("<4I", body)
        path = self._child(node, body[16:])
        file = os.open(self._behind / path, os.O_RDWR | os.O_CREAT, stat.S_IMODE(mode & ~umask))
        return self._entry(path) + _OPEN.pack(file, 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        file, offset, size, *_ = _READ.unpack_from(body)
        return os.pread(file, size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        file, offset, size, *_ = _READ.unpack_from(body)
        return struct.pack("<II", os.pwrite(file, body[_READ.size :][:size], offset), 0)

    def _fsync(self, node: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _statfs(self, node: int, body: bytes) -> bytes:
        got = os.statvfs(self._behind)
        counts = (got.f_blocks, got.f_bfree, got.f_bavail, got.f_files, got.f_ffree)
        return struct.pack("<5Q10I", *counts, got.f_bsize, 255, got.f_frsize, *[0] * 7)

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_ = _READ.unpack_from(body)
        listed, answer = sorted(self._path(node).iterdir()), b""
        for place, path in enumerate(listed[offset:], offset + 1):
            name = os.fsencode(path.name)
            kind = stat.S_IFMT(path.lstat().st_mode) >> 12
            record = struct.pack("<QQII", path.lstat().st_ino, place, len(name), kind) + name
            record += bytes(-len(record) % 8)
            if len(answer) + len(record) > size:
                break
            answer += record
        return answer


def _unknown(node: int, body: bytes) -> bytes:
    raise OSError(errno.ENOSYS, "not implemented")


def _attr(of: os.stat_result, number: int) -> bytes:
    seconds = tuple(int(value) for value in (of.st_atime, of.st_mtime, of.st_ctime))
    return _ATTR.pack(
        *(number, of.st_size, of.st_blocks, *seconds, 0, 0, 0),
        *(of.st_mode, of.st_nlink, of.st_uid, of.st_gid, 0, 4096, 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFs:
    """A file system that is mounted. Files put into `behind` appear in it."""

    mountpoint: Path
    behind: Path
    pid: int
    _process: subprocess.Popen[str]

    def delay(self, **seconds: float) -> None:
        """Sets delays by operation; those not named stay."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(seconds) + "\n")
        self._process.stdin.flush()


def privileged() -> bool:
    """Whether this process is root and has CAP_SYS_ADMIN; root in a container mostly has not."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return os.geteuid() == 0 and bool(effective >> _CAP_SYS_ADMIN & 1)


def usable() -> str | None:
    """None where such a file system can be mounted, else why not."""
    if not privileged():
        return "mounting a FUSE file system needs root and CAP_SYS_ADMIN"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return None


@contextmanager
def slow_fs(
    mountpoint: Path, behind: Path, delays: Mapping[str, float], *, kind: str = "slow"
) -> Iterator[SlowFs]:
    """Mounts `behind` at `mountpoint` (both made if missing) as a file system `fuse.<kind>`."""
    mountpoint.mkdir(parents=True, exist_ok=True)
    behind.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, __file__, "--kind", kind, str(mountpoint), str(behind)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], 10.0)
        if not ready or process.stdout.readline() != "ready\n":
            raise RuntimeError("the FUSE server did not start")
        fs = SlowFs(mountpoint=mountpoint, behind=behind, pid=process.pid, _process=process)
        fs.delay(**delays)
        yield fs
    finally:
        _libc().umount2(os.fsencode(mountpoint), MNT_DETACH)
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mount(mountpoint: Path, kind: str) -> int:
    """Returns the descriptor of /dev/fuse that serves the mount; raises OSError."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={_WRITE_MAX}"
    words = (f"{kind}fs", str(mountpoint), f"fuse.{kind}")
    failed = _libc().mount(*map(os.fsencode, words), ctypes.c_ulong(6), options.encode())
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(mountpoint))
    return device


def main() -> None:
    """The server: delays come as JSON lines on its input, whose end is its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="slow")
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("behind", type=Path)
    options = parser.parse_args()
    server = Server(_mount(options.mountpoint, options.kind), options.behind)
    for _ in range(_SERVERS):
        threading.Thread(target=server.serve, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        given = json.loads(line)
        if unknown := set(given) - set(OPERATIONS):
            sys.stderr.write(f"no operation is called {', '.join(sorted(unknown))}\n")
        server.delays = {**server.delays, **given}
    _libc().umount2(os.fsencode(options.mountpoint), MNT_DETACH)
    os._exit(0)  # threads still sit in reads of the device


if __name__ == "__main__":
    main()
