"""Families that are computed rather than copied: the ledger's, and those of the agent itself."""

from __future__ import annotations

from whyidle.metrics_families import SAMPLED, STALE_RARE_S, Family

_GPU = ("gpu", "uuid")

IDLE = Family(
    name="whyidle_gpu_idle_seconds",
    kind="counter",
    meaning="Time in which the GPU computed nothing, by cause; empty and spinning together.",
    labels=(*_GPU, "cause"),
)
EMPTY = Family(
    name="whyidle_gpu_empty_seconds",
    kind="counter",
    meaning="Part of idle in which no kernel was resident, by cause.",
    labels=(*_GPU, "cause"),
)
SPINNING = Family(
    name="whyidle_gpu_spinning_seconds",
    kind="counter",
    meaning="Part of idle in which kernels were resident and none computed, by cause.",
    labels=(*_GPU, "cause"),
)
WORKING = Family(
    name="whyidle_gpu_working_seconds",
    kind="counter",
    meaning="Time in which the GPU computed.",
    labels=_GPU,
)
JOB_IDLE = Family(
    name="whyidle_job_gpu_idle_seconds",
    kind="counter",
    meaning="Idle time of a GPU while a job had it; off by default, for the last 64 jobs.",
    labels=("job_id", *_GPU, "cause"),
)
JOB_WORKING = Family(
    name="whyidle_job_gpu_working_seconds",
    kind="counter",
    meaning="Time in which a GPU computed while a job had it; off by default.",
    labels=("job_id", *_GPU),
)
INFO = Family(
    name="whyidle_gpu_info",
    kind="gauge",
    meaning="1; the labels describe the GPU.",
    labels=(*_GPU, "model", "pci_bus_id", "driver_version", "parent_uuid"),
    peer="labels modelName, pci_bus_id and DCGM_FI_DRIVER_VERSION",
)
INFO_LABELS = ("name", "pci_bus_id", "driver_version", "parent_uuid")
INFO_STALE_S = STALE_RARE_S

LAG = Family(
    name="whyidle_ledger_lag_seconds",
    kind="gauge",
    meaning="How far the end of the last settled interval lies back; 30 to 60 when all is well.",
)
SETTLED = Family(
    name="whyidle_ledger_settled_timestamp_seconds",
    kind="gauge",
    meaning="Wall time of the end of the last settled interval.",
)
SETTLED_MONOTONIC = Family(
    name="whyidle_ledger_settled_monotonic_seconds",
    kind="gauge",
    meaning="The same in time of the recording: mono_ns of the newest rows that are counted.",
)
BEGAN = Family(
    name="whyidle_ledger_began_monotonic_seconds",
    kind="gauge",
    meaning="Begin of the first interval that is in the counters, which start anew with each boot.",
)
SETTLEMENTS = Family(
    name="whyidle_ledger_intervals",
    kind="counter",
    meaning="Intervals that were settled, since the keeper began.",
)
FAILURES = Family(
    name="whyidle_ledger_failures",
    kind="counter",
    meaning="Intervals whose idle time could not be charged by the rules.",
)
FAILING = Family(
    name="whyidle_ledger_failing",
    kind="gauge",
    meaning="1 if the last interval could not be charged by the rules, else 0.",
)
SKIPPED = Family(
    name="whyidle_ledger_skipped_seconds",
    kind="counter",
    meaning="Time that was never settled: too old when the keeper came back.",
)
TOOK = Family(
    name="whyidle_ledger_evaluation_seconds",
    kind="gauge",
    meaning="How long the last interval took to settle.",
)
WINDOWS = Family(
    name="whyidle_ledger_windows",
    kind="counter",
    meaning="GPU windows that were settled, since the keeper began.",
)
EVALUATION_CPU = Family(
    name="whyidle_ledger_cpu_seconds",
    kind="counter",
    meaning="CPU time that settling used, since the keeper began.",
)
RUNS = Family(
    name="whyidle_collector_runs",
    kind="counter",
    meaning="Runs of a collector, since the keeper began.",
    labels=("collector",),
)
MISSED = Family(
    name="whyidle_collector_missed_runs",
    kind="counter",
    meaning="Due runs of a collector that never began.",
    labels=("collector",),
)
ERRORS = Family(
    name="whyidle_collector_errors",
    kind="counter",
    meaning="Rows of collector_error, by kind: no_data says that this machine has it not.",
    labels=("collector", "kind"),
)
SAMPLE_AGE = Family(
    name="whyidle_sample_age_seconds",
    kind="gauge",
    meaning="Age of the newest sample when this page was made; a minute and more: the sampler is "
    "down.",
)
ANSWERS = Family(
    name="whyidle_exporter_responses",
    kind="counter",
    meaning="Answers to HTTP requests.",
    labels=("code",),
)
CONNECTIONS = Family(
    name="whyidle_exporter_failed_connections",
    kind="counter",
    meaning="Connections without an answer: refused (too many), late (past 10 s), broken.",
    labels=("reason",),
)
RELOAD_FAILED = Family(
    name="whyidle_exporter_web_config_failing",
    kind="gauge",
    meaning="1 if the web configuration file is not in order and the one before is in use.",
)
PAGE_TIME = Family(
    name="whyidle_page_timestamp_seconds",
    kind="gauge",
    meaning="When the values of this page were put together.",
)
BUILD = Family(
    name="whyidle_build_info",
    kind="gauge",
    meaning="1; the version of the agent.",
    labels=("version",),
)

LEDGER: tuple[Family, ...] = (IDLE, EMPTY, SPINNING, WORKING, JOB_IDLE, JOB_WORKING)
SELF: tuple[Family, ...] = (
    LAG,
    SETTLED,
    SETTLED_MONOTONIC,
    BEGAN,
    SETTLEMENTS,
    FAILURES,
    FAILING,
    SKIPPED,
    TOOK,
    WINDOWS,
    EVALUATION_CPU,
    RUNS,
    MISSED,
    ERRORS,
    SAMPLE_AGE,
    ANSWERS,
    CONNECTIONS,
    RELOAD_FAILED,
    PAGE_TIME,
    BUILD,
)
FAMILIES: tuple[Family, ...] = (*LEDGER, INFO, *SAMPLED, *SELF)
