"""The configuration of the service: one declaration for the file, the environment and the docs.

Everything works with no file at all: each default says why it is what it is. The settings that are
given are read by `config_load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from whyidle.config_kinds import (
    ADDRESS,
    COLLECTORS,
    FLAG,
    FOLDER,
    FOLDERS,
    NAME,
    PATH,
    POSITIVE,
    URL,
    Kind,
)

SERVICE_FOLDER = Path("/var/lib/whyidle")
ENVIRONMENT = "WHYIDLE_"
DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a setting is called in the file, what it may be, and why its default is what it is."""

    key: str
    kind: Kind
    meaning: str
    reason: str
    # Whether SIGHUP brings a change into effect; else the service has to be restarted.
    reloads: bool

    @property
    def variable(self) -> str:
        """Name of the environment variable that overrides it."""
        return ENVIRONMENT + self.key.upper().replace(".", "_")


def _said(
    key: str, kind: Kind, meaning: str, reason: str, *, reloads: bool = True
) -> dict[str, Setting]:
    setting = Setting(key=key, kind=kind, meaning=meaning, reason=reason, reloads=reloads)
    return {"setting": setting}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of an agent."""

    recording: Path = field(
        default=SERVICE_FOLDER,
        metadata=_said(
            "recording",
            FOLDER,
            "folder that is recorded into",
            "where services keep their state",
            reloads=False,
        ),
    )
    node: str | None = field(
        default=None,
        metadata=_said(
            "node",
            NAME,
            "name of this node",
            "the kernel's hostname is unique on a cluster",
            reloads=False,
        ),
    )
    journal: bool = field(
        default=False,
        metadata=_said(
            "journal",
            FLAG,
            "keep what the machine answered too, for `whyidle replay` and bug reports",
            "it takes more room than the samples, and is of use only to look for a bug of ours",
        ),
    )
    probe_folders: tuple[Path, ...] = field(
        default=(),
        metadata=_said(
            "probe.folders",
            FOLDERS,
            "further folders in which trainers publish counters",
            "/run/whyidle/probe and the folders of `whyidle run` are always read",
        ),
    )
    without: tuple[str, ...] = field(
        default=(),
        metadata=_said(
            "collectors.without",
            COLLECTORS,
            "collectors that are not run, by name",
            "what a machine does not have costs next to nothing, so all are on",
        ),
    )
    dcgm_url: str | None = field(
        default=None,
        metadata=_said(
            "dcgm.url",
            URL,
            "page of a DCGM exporter on this node, such as http://localhost:9400/metrics",
            "no connection is made that nobody asked for; GPUs before Hopper tell more with it",
        ),
    )
    keep_days: float = field(
        default=7.0,
        metadata=_said(
            "keep.days",
            POSITIVE,
            "days after which samples are deleted",
            "a week holds the run that somebody asks about on Monday",
        ),
    )
    keep_gb: float = field(
        default=10.0,
        metadata=_said(
            "keep.gb",
            POSITIVE,
            "gigabytes of segments that are kept, the newest",
            "a busy node records about 1 GB a day once merged",
        ),
    )
    free_gb: float = field(
        default=1.0,
        metadata=_said(
            "keep.free_gb",
            POSITIVE,
            "gigabytes that are left free on the file system; the oldest segments go first",
            "a monitor must not be what fills a disk",
        ),
    )
    metrics_listen: str | None = field(
        default="127.0.0.1:19836",
        metadata=_said(
            "metrics.listen",
            ADDRESS,
            "address and port of the metrics for Prometheus, or `off`",
            "nothing is open to the network unless asked for; the port is in no list of exporters",
        ),
    )
    metrics_web_config: Path | None = field(
        default=None,
        metadata=_said(
            "metrics.web_config",
            PATH,
            "web configuration file (TLS, basic authentication), as Prometheus exporters have it",
            "the loopback needs neither",
        ),
    )
    metrics_textfile: Path | None = field(
        default=None,
        metadata=_said(
            "metrics.textfile",
            PATH,
            "file to write the metrics into, for the textfile collector of node_exporter",
            "for nodes on which no other port may be opened",
        ),
    )
    metrics_subcause: bool = field(
        default=False,
        metadata=_said(
            "metrics.subcause",
            FLAG,
            "a label `subcause` on the idle seconds",
            "it multiplies the series of a GPU by five",
        ),
    )
    metrics_job: bool = field(
        default=False,
        metadata=_said(
            "metrics.job",
            FLAG,
            "the seconds of GPUs by job as well, as `whyidle_job_*`",
            "each job makes new series; those of the last 64 jobs are kept",
        ),
    )
    rules_dirs: tuple[Path, ...] = field(
        default=(),
        metadata=_said(
            "rules.dirs",
            FOLDERS,
            "further folders of rules; a rule of the same id replaces an earlier one",
            "/etc/whyidle/rules.d is always read where it exists",
        ),
    )
    settle: bool = field(
        default=True,
        metadata=_said(
            "rules.settle",
            FLAG,
            "charge idle seconds to causes while recording",
            "metrics by cause need it; without it the node only records",
        ),
    )

    ledger_days: float = field(
        default=400.0,
        metadata=_said(
            "ledger.keep_days",
            POSITIVE,
            "days after which the ledger by the minute is deleted",
            "it answers what last year was like, and is small",
        ),
    )
    ledger_gb: float = field(
        default=1.0,
        metadata=_said(
            "ledger.keep_gb",
            POSITIVE,
            "gigabytes of ledger that are kept, the newest",
            "more than a year of a node of 8 GPUs",
        ),
    )

    @property
    def sampler(self) -> tuple[str, ...]:
        """Arguments of the sampler."""
        return (
            *(("--journal",) if self.journal else ()),
            *_each("--probe-dir", self.probe_folders),
            *_each("--without", self.without),
            *_each("--dcgm-url", () if self.dcgm_url is None else (self.dcgm_url,)),
        )

    @property
    def retention(self) -> tuple[str, ...]:
        """Arguments of every keeper."""
        return (
            *("--retain-s", str(self.keep_days * DAY_S)),
            *("--retain-bytes", str(int(self.keep_gb * 1e9))),
            *("--free-bytes", str(int(self.free_gb * 1e9))),
        )

    @property
    def evaluation(self) -> tuple[str, ...]:
        """Arguments of a keeper that evaluates rules and serves metrics."""
        listen = () if self.metrics_listen is None else (self.metrics_listen,)
        web = () if self.metrics_web_config is None else (self.metrics_web_config,)
        textfile = () if self.metrics_textfile is None else (self.metrics_textfile,)
        return (
            *_each("--metrics-listen", listen),
            *_each("--metrics-web-config", web),
            *_each("--metrics-textfile", textfile),
            *(("--metrics-subcause",) if self.metrics_subcause else ()),
            *(("--metrics-job",) if self.metrics_job else ()),
            *_each("--rules-dir", self.rules_dirs),
            *(() if self.settle else ("--no-settle",)),
            *("--ledger-retain-s", str(self.ledger_days * DAY_S)),
            *("--ledger-retain-bytes", str(int(self.ledger_gb * 1e9))),
        )


def _each(option: str, values: Sequence[object]) -> tuple[str, ...]:
    return tuple(word for value in values for word in (option, str(value)))


def settings() -> dict[str, Setting]:
    """Return all settings, by the name of their field in Config."""
    return {one.name: one.metadata["setting"] for one in fields(Config)}
