"""Counter pages: what trainers with the probe say of themselves, 2 times a second.

Steps and waits have times of their own in a page, so that it need not be read as often as a GPU: a
page whose rings fill quickly is read 4 times a second.

Source: `<uuid>.page` files in the folders of pages; see whyidle.probe_page. They are only ever read
with pread, never mapped: a page that is cut short cannot hurt the agent. Which pages there are,
whose they are and whether that process still runs is looked at once a second.
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle import probe_page as page
from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.probe_folder import Folders
from whyidle.collect.probe_live import Live, ProbeRow
from whyidle.collect.probe_owner import Owner, Owners, is_running
from whyidle.collect.probe_silent import Silent
from whyidle.host import Host

# At 8 Hz every verdict on the recorded stalls is the same to the point, and 8 pages cost 0.2 % of a
# core.
_EVERY_S = 0.25
_SCAN_EVERY_NS = NS_PER_S
# A page that cannot be used is looked at again after this long, and then ever more rarely.
_AGAIN_NS = 2 * NS_PER_S
_AGAIN_LIMIT_NS = 60 * NS_PER_S
# A page is empty for a moment while it is made.
_EMPTY_NS = 2 * NS_PER_S
# Eight GPUs have eight trainers; this many is a folder that somebody fills.
_PAGES_LIMIT = 512


class _Bad:
    """A page that is not read: why, and when it is looked at again."""

    __slots__ = ("due_ns", "first_ns", "message", "pause_ns")

    def __init__(self, now_ns: int) -> None:
        self.first_ns = now_ns
        self.due_ns = now_ns
        self.pause_ns = _AGAIN_NS
        self.message: str | None = None

    def put_off(self, now_ns: int, message: str | None) -> None:
        """Look again later; `message` is what is said meanwhile, None for nothing."""
        self.message = message
        self.due_ns = now_ns + self.pause_ns
        self.pause_ns = min(_AGAIN_LIMIT_NS, self.pause_ns * 2)


class Pages:
    """All pages of the node."""

    __slots__ = ("_bad", "_due_ns", "_folders", "_live", "_owners", "_said", "_silent")

    def __init__(self) -> None:
        self._folders = Folders()
        self._owners = Owners()
        self._silent = Silent()
        self._live: dict[str, Live] = {}
        self._bad: dict[str, _Bad] = {}
        self._due_ns = 0
        self._said: list[Problem] = []

    def collect(self, host: Host) -> Iterator[ProbeRow | Problem]:
        """Read every page once."""
        now_ns = host.clock.mono_ns()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + _SCAN_EVERY_NS
            yield from self._scan(host, now_ns)
        read, mono_ns = host.read_bytes, host.clock.mono_ns
        for live in list(self._live.values()):
            if live.read_ns < now_ns < live.due_ns:
                continue
            # Most readings find a page as it was, and end here: 12 us of the 17 that they took.
            try:
                data = read(live.path)
            except OSError:
                data = b""  # asked again below, where it is told what is wrong
            if not (data and live.unchanged(data, mono_ns())):
                yield from self._read(host, live, data)
        if not self._live and not self._folders.found:
            raise NoData(self._folders.why)

    def _read(self, host: Host, live: Live, data: bytes = b"") -> Iterator[ProbeRow | Problem]:
        try:
            yield from live.read(host, data or host.read_bytes(live.path))
        except page.NotReadyError:
            return  # its header is being changed: a quarter of a second later it is whole
        except FileNotFoundError:
            self._drop(host, live.path)
        except (OSError, ValueError) as error:
            self._drop(host, live.path)
            bad = self._bad.setdefault(live.path, _Bad(host.clock.mono_ns()))
            bad.put_off(host.clock.mono_ns(), _words(error))
            yield Problem(subject="/" + live.path, message=_words(error))

    def _drop(self, host: Host, path: str) -> None:
        live = self._live.pop(path, None)
        host.forget(path)
        if live is not None:
            host.forget(f"proc/{live.owner.pid}/")

    def _scan(self, host: Host, now_ns: int) -> Iterator[ProbeRow | Problem]:
        """Bring the list of pages up to date: what is new, what has ended, what is wrong."""
        paths, problems = self._folders.pages(host, now_ns)
        yield from problems
        listed = set(paths)
        self._bad = {path: bad for path, bad in self._bad.items() if path in listed}
        for live in list(self._live.values()):
            if live.path not in listed or not is_running(host, live.owner):
                # What it wrote last is told before it is let go: its file is still open here.
                yield from self._read(host, live)
                self._drop(host, live.path)
                if live.path in listed:
                    self._bad[live.path] = bad = _Bad(now_ns)
                    bad.put_off(now_ns, None)
        self._owners.begin()
        for path in paths:
            if path not in self._live:
                self._meet(host, path, now_ns)
        self._replace(host)
        for path, bad in self._bad.items():
            if bad.message is not None:
                yield Problem(subject="/" + path, message=bad.message)
        owners = {live.owner.pid for live in self._live.values()}
        yield from self._silent.problems(host, now_ns, owners, self._folders.found)

    def _meet(self, host: Host, path: str, now_ns: int) -> None:
        """Take a page in if it is one, its process runs, and both belong to the same user."""
        bad = self._bad.setdefault(path, _Bad(now_ns))
        if now_ns < bad.due_ns:
            return
        try:
            if len(self._live) >= _PAGES_LIMIT:
                raise ValueError(f"is not read: there are {_PAGES_LIMIT} other pages")
            header, owner = self._check(host, path, now_ns - bad.first_ns >= _EMPTY_NS)
        except (page.NotReadyError, FileNotFoundError):
            bad.due_ns = now_ns + _SCAN_EVERY_NS
        except (OSError, ValueError) as error:
            host.forget(path)
            bad.put_off(now_ns, _words(error))
        else:
            if owner is None:
                # Left by a process that was killed: nothing is wrong.
                host.forget(path)
                bad.put_off(now_ns, None)
                return
            del self._bad[path]
            self._live[path] = Live(path, header, owner)

    def _check(self, host: Host, path: str, aged: bool) -> tuple[page.Header, Owner | None]:
        found = host.stat(path)
        if not found.is_file:
            raise ValueError("is no regular file")
        if found.size_bytes == 0:
            if not aged:
                raise page.NotReadyError
            raise ValueError(
                "is empty: there was no room for it, so its trainer is not seen; "
                "free space in its folder"
            )
        if found.size_bytes not in page.SIZES.values():
            raise ValueError(
                f"has {found.size_bytes} bytes, not {page.PAGE_BYTES}: no page of a probe"
            )
        header = page.parse_header(host.read_bytes(path))
        owner = self._owners.find(host, header.pid, header.start_ns)
        if owner is not None and owner.user_id != found.user_id:
            raise ValueError(
                f"belongs to user {found.user_id} and names a process of user {owner.user_id}: "
                "forged, and not read"
            )
        return header, owner

    def _replace(self, host: Host) -> None:
        """Of two pages of one process the newer counts: it has called exec."""
        newest: dict[tuple[int, int], Live] = {}
        for live in list(self._live.values()):
            key = (live.owner.pid, live.owner.start_ns)
            other = newest.setdefault(key, live)
            if other is live:
                continue
            older, newer = sorted((other, live), key=lambda item: item.header.opened_ns)
            newest[key] = newer
            self._drop(host, older.path)
            bad = self._bad.setdefault(older.path, _Bad(older.header.opened_ns))
            bad.due_ns = 1 << 62  # never: what replaced it stays


def _words(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return str(error)


def make() -> Collect:
    """Return the collector, with the pages that it knows."""
    return Pages().collect


# A folder of pages may be a mount that does not answer: it must not hold up the loop.
PROBE = Collector(name="probe", lane="fast", make=make, thread="probe", every_s=_EVERY_S)
