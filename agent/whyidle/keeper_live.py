"""What the keeper does beside keeping: it settles the ledger and serves metrics.

All of it may fail without consequence for the recording: a failure is told once in the log and
shown in the metrics, and the next look tries again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import duckdb

from whyidle.clock import NS_PER_S
from whyidle.errors import UserError
from whyidle.exporter import Exporter, parse_listen
from whyidle.host import Host
from whyidle.keeper import Retention
from whyidle.layout import Identity
from whyidle.ledger import Ledger
from whyidle.metrics import Choice, Pages, State
from whyidle.metrics_recent import Recent, Values
from whyidle.runner import describe
from whyidle.sampler import resident_bytes
from whyidle.settle import EVERY_NS, LAG_NS, Evaluation, Evaluator, Settler
from whyidle.spool_tail import SpoolTail

LOG = logging.getLogger("whyidle.keeper")
# node_exporter reads the file whenever it is scraped, which is every 15 s by custom.
TEXTFILE_NS = 15 * NS_PER_S
# A ledger's piece is finished once an hour.
KEEP_NS = 60 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What an evaluator is made for."""

    recording: Path
    identity: Identity
    rules: tuple[Path, ...]


MakeEvaluator = Callable[[Around], Evaluator]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of metrics and ledger."""
    parser.add_argument("--metrics-listen", default="")
    parser.add_argument("--metrics-web-config", type=Path, default=None)
    parser.add_argument("--metrics-textfile", type=Path, default=None)
    parser.add_argument("--metrics-subcause", action="store_true")
    parser.add_argument("--metrics-job", action="store_true")
    parser.add_argument("--rules-dir", type=Path, action="append", default=[])
    parser.add_argument("--no-settle", action="store_true")
    parser.add_argument("--ledger-retain-s", type=float, default=None)
    parser.add_argument("--ledger-retain-bytes", type=int, default=None)
    # For tests, which cannot wait: how often to settle, and how late.
    parser.add_argument("--settle-every-s", type=float, default=EVERY_NS / NS_PER_S)
    parser.add_argument("--settle-lag-s", type=float, default=LAG_NS / NS_PER_S)


class KeeperLive:
    """Settles and serves at each look of the keeper; `close` ends it."""

    __slots__ = (
        "_address",
        "_clock",
        "_exporter",
        "_failed",
        "_host",
        "_kept_ns",
        "_ledger",
        "_pages",
        "_recent",
        "_settler",
        "_tail",
        "_textfile",
        "_version",
        "_web_config",
        "_written_ns",
    )

    def __init__(
        self,
        options: argparse.Namespace,
        identity: Identity,
        host: Host,
        make_evaluator: MakeEvaluator | None,
    ) -> None:
        self._host = host
        self._clock = host.clock
        self._version = importlib.metadata.version("whyidle")
        self._tail = SpoolTail(identity.folder(options.recording) / "spool")
        self._recent = Recent()
        self._ledger: Ledger | None = None
        self._settler: Settler | None = None
        self._exporter: Exporter | None = None
        self._failed: dict[str, str] = {}
        self._kept_ns = self._written_ns = host.clock.mono_ns() - TEXTFILE_NS
        self._textfile: Path | None = options.metrics_textfile
        self._web_config: Path | None = options.metrics_web_config
        self._address: str = options.metrics_listen
        if make_evaluator is not None and not options.no_settle:
            around = Around(
                recording=options.recording, identity=identity, rules=tuple(options.rules_dir)
            )
            self._ledger = _ledger(options, identity, host)
            self._settler = Settler(
                _evaluator(make_evaluator, around),
                self._ledger.spool,
                self._clock,
                resumed=self._ledger.resume(),
                every_ns=int(options.settle_every_s * NS_PER_S),
                lag_ns=int(options.settle_lag_s * NS_PER_S),
            )
        choice = Choice(subcause=options.metrics_subcause, job=options.metrics_job)
        self._pages = Pages(self._state(), choice)

    def look(self) -> None:
        """Read what was sampled, settle what is due, publish; never raises."""
        if not (self._address or self._textfile or self._settler):
            return  # nobody would see it
        self._try("metrics cannot be served", self._listen)
        self._try("the spool cannot be followed", self._follow)
        self._try("the ledger cannot be written", self._settle)
        self._pages.publish(self._state())
        self._try("the textfile cannot be written", self._write_textfile)

    def close(self, *, ended: bool, merge: bool) -> None:
        """End; if the sampler has `ended`, what is left is settled as well. Never raises."""
        if self._exporter is not None:
            self._exporter.close()
        self._try("the spool cannot be followed", self._follow)
        self._try("the ledger cannot be written", lambda: self._finish(ended, merge))
        if self._textfile is not None:
            self._textfile.unlink(missing_ok=True)  # values of the past are no answer

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """Do something; say once that it fails and that it works again."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - none of this may end the keeper
            said = str(error) if isinstance(error, UserError) else f"{what}: {describe(error)}"
            if self._failed.get(what) != said:
                LOG.error("%s", said)
                self._failed[what] = said
            return
        if self._failed.pop(what, None) is not None:
            LOG.info("no longer so: %s", what)

    def _listen(self) -> None:
        if self._exporter is None and self._address:
            address = parse_listen(self._address)
            self._exporter = Exporter(
                self._pages, address, self._clock, web_config=self._web_config
            )
            LOG.info("metrics are served on %s", self._address)

    def _follow(self) -> None:
        self._recent.take(self._tail.look())

    def _settle(self) -> None:
        if self._settler is None or self._ledger is None:
            return
        self._settler.look(self._recent.newest_ns)
        now = self._clock.mono_ns()
        if now - self._kept_ns >= KEEP_NS:
            self._kept_ns = now
            self._ledger.keep()

    def _finish(self, ended: bool, merge: bool) -> None:
        if self._settler is None or self._ledger is None:
            return
        self._settler.finish(self._recent.newest_ns if ended else None)
        self._ledger.keep(drain=True)
        if merge:
            self._ledger.merge()

    def _write_textfile(self) -> None:
        now = self._clock.mono_ns()
        if self._textfile is None or now - self._written_ns < TEXTFILE_NS:
            return
        self._written_ns = now
        body, _ = self._pages("")
        part = self._textfile.with_name(f".{self._textfile.name}.part")
        part.write_bytes(body)
        part.rename(self._textfile)

    def _state(self) -> State:
        now = self._clock.mono_ns()
        served = None if self._exporter is None else self._exporter.served
        return State(
            version=self._version,
            mono_ns=now,
            wall_ns=self._clock.wall_ns(),
            counts=None if self._settler is None else self._settler.counts.copy(),
            settling=None if self._settler is None else self._settler.settling.copy(),
            gpus={uuid: self._recent.index(uuid) for uuid in self._recent.active_gpus(now)},
            sampled=self._with_itself(self._recent.values(now)),
            runs=self._recent.runs.copy(),
            newest_ns=self._recent.newest_ns,
            answers={} if served is None else dict(served.answers),
            failed_connections={}
            if served is None
            else {"refused": served.refused, "late": served.late, "broken": served.broken},
            reload_failed=None
            if served is None or self._web_config is None
            else served.reload_failed,
        )

    def _with_itself(self, values: Values) -> Values:
        """Add what the keeper costs: its own rows go into segments and are not in the spool."""
        part = ("keeper",)
        cpu = self._clock.process_cpu_ns() / NS_PER_S
        values.setdefault("whyidle_agent_cpu_seconds", {})[part] = cpu
        rss = resident_bytes(self._host)
        if rss is not None:
            values.setdefault("whyidle_agent_resident_memory_bytes", {})[part] = float(rss)
        return values


def _ledger(options: argparse.Namespace, identity: Identity, host: Host) -> Ledger:
    retention = Retention(age_s=options.ledger_retain_s, size_bytes=options.ledger_retain_bytes)
    return Ledger(options.recording, identity, host, pid=os.getpid(), retention=retention)


def _evaluator(make: MakeEvaluator, around: Around) -> Evaluator:
    """Return what charges; where the rules are not good, what says so of each interval."""
    try:
        return make(around)
    except (UserError, OSError, duckdb.Error) as error:
        return _Refusing(str(error))


class _Refusing:
    """Charges nothing, and says why."""

    __slots__ = ("_why",)

    def __init__(self, why: str) -> None:
        self._why = why

    def evaluate(self, begin_ns: int, end_ns: int) -> Evaluation:
        """Raise what was wrong when the rules were read."""
        raise UserError(self._why)
