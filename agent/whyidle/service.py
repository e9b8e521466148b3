"""`whyidle agent`: an agent that runs until it is stopped, as a service of systemd or by itself.

SIGHUP reads the configuration again. One that is bad, or that asks for what only a restart can
change, is refused and the old one stays. The watchdog is fed while everything gets on, see
`Supervisor.overdue`: a service that hangs is killed and started again by systemd.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import fields

from whyidle.child import configure_log
from whyidle.clock import Clock
from whyidle.config import Config, settings
from whyidle.config_load import Loaded, Loader
from whyidle.errors import UserError
from whyidle.host import Host, LiveHost
from whyidle.layout import identify
from whyidle.notify import Notifier
from whyidle.release import WHY, DriverWatch
from whyidle.supervisor import KEEPER, PARTS, SAMPLER_PART, SI_KERNEL, SIGNALS, TEND_S, Supervisor

LOG = logging.getLogger("whyidle.agent")


class Service:
    """An agent of this node, or one part of it. `load` reads the configuration.

    `keeper` is the module of the keeper; all but the agent's own are passed what evaluation needs.
    """

    __slots__ = (
        "_clock",
        "_config",
        "_driver",
        "_host",
        "_hung",
        "_keeper",
        "_load",
        "_notifier",
        "_parts",
        "_ready",
        "_root",
        "_supervisor",
    )

    def __init__(
        self,
        load: Loader,
        clock: Clock,
        notifier: Notifier,
        *,
        parts: Sequence[str] = PARTS,
        keeper: str = KEEPER,
        root: str = "/",
    ) -> None:
        self._load = load
        self._clock = clock
        self._notifier = notifier
        self._parts = tuple(parts)
        self._keeper = keeper
        self._root = root
        self._host: Host = LiveHost(root, clock)
        self._driver: DriverWatch | None = None
        self._ready = False
        self._hung = ""
        loaded = load()
        _warn(loaded)
        self._config = loaded.config
        self._supervisor = Supervisor(
            self._config.recording,
            identify(self._host, self._config.node),
            clock,
            root=root,
            parts=self._parts,
            keeper=keeper,
        )

    def run(self) -> int:
        """Record until SIGTERM, SIGINT or the end of the terminal; 1 if the spool is not empty."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._supervisor.begin(self._config.sampler, self._keeper_arguments(self._config))
        except OSError as error:
            raise UserError(f"cannot start the agent: {error.strerror}; try again") from error
        if SAMPLER_PART not in self._parts:
            self._say_ready()  # the sampler starts behind it, and must not wait for its first cycle
        while not self._to_stop(signal.sigtimedwait(SIGNALS, TEND_S)):
            self._tend()
        self._notifier.stopping()
        return 0 if self._supervisor.stop() else 1

    def _to_stop(self, info: signal.struct_siginfo | None) -> bool:
        if info is None or info.si_signo == signal.SIGCHLD:
            return False
        if info.si_signo == signal.SIGHUP and info.si_code != SI_KERNEL:
            self._reload()
            return False
        return True

    def _tend(self) -> None:
        supervisor = self._supervisor
        if SAMPLER_PART in self._parts:
            self._heed_requests()
        supervisor.tend()
        if not self._ready and supervisor.ready():
            self._say_ready()
        hung = supervisor.overdue()
        if not hung:
            self._notifier.alive()
        elif not self._hung:
            LOG.error("%s", hung)
            self._notifier.status(hung)
        self._hung = hung

    def _say_ready(self) -> None:
        self._ready = True
        status = self._status()
        LOG.info("%s", status)
        self._notifier.ready(status)

    def _heed_requests(self) -> None:
        """Let go of the GPUs if somebody asked for them, or take them back."""
        supervisor = self._supervisor
        if self._driver is not None and self._driver.is_back():
            LOG.info("the driver is back")
            supervisor.take_back()
        wanted = supervisor.release_wanted()
        if wanted and self._driver is None:
            self._driver = DriverWatch(self._host)
        elif not wanted:
            self._driver = None
        if wanted != supervisor.released:
            LOG.info("%s", WHY if wanted else "the GPUs are taken back")
            supervisor.let_go(released=wanted)
            self._notifier.status(self._status())

    def _reload(self) -> None:
        """Take a changed configuration over, or say why not and go on with the old one."""
        self._notifier.reloading(self._clock.mono_ns())
        try:
            loaded = self._load()
            _refuse(self._config, loaded.config)
        except UserError as error:
            LOG.error("the old configuration stays: %s", error)
            self._notifier.ready(f"the old configuration stays: {error}")
            return
        _warn(loaded)
        self._config = loaded.config
        self._supervisor.apply(self._config.sampler, self._keeper_arguments(self._config))
        LOG.info("the configuration was read again%s", _from(loaded))
        self._notifier.ready(self._status())

    def _keeper_arguments(self, config: Config) -> tuple[str, ...]:
        more = () if self._keeper == KEEPER else config.evaluation
        return (*config.retention, *more)

    def _status(self) -> str:
        what = "writing segments of" if SAMPLER_PART not in self._parts else "recording into"
        more = "; " + WHY if self._supervisor.released else ""
        return f"{what} {self._config.recording}{more}"


def _refuse(old: Config, new: Config) -> None:
    """Raise UserError if a setting changed that a running agent cannot change."""
    for one in fields(Config):
        setting = settings()[one.name]
        if not setting.reloads and getattr(old, one.name) != getattr(new, one.name):
            raise UserError(f"`{setting.key}` changed, which takes effect only after a restart")


def _warn(loaded: Loaded) -> None:
    for warning in loaded.warnings:
        LOG.warning("%s", warning)


def _from(loaded: Loaded) -> str:
    return f" from {loaded.file}" if loaded.file is not None else ""


def serve(load: Loader, clock: Clock, parts: Sequence[str] = PARTS, keeper: str = KEEPER) -> int:
    """Record until told to stop; raises UserError if it cannot begin."""
    configure_log("agent" if SAMPLER_PART in parts else "keeper")
    notifier = Notifier(os.environ, os.getpid())
    return Service(load, clock, notifier, parts=parts, keeper=keeper).run()
