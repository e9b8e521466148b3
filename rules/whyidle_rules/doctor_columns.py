"""Which columns of the evidence come from which source: what is blind when a source is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from whyidle_rules.rule import Rule

_LOADER = ("loader_cpu_ratio", "loader_runq_ratio", "loader_io_ratio", "loader_read_bytes")
_MAIN = ("main_run_s", "main_ready_s", "main_blocked_s", "main_asleep_s")
_PHASES = (
    *("data_wait_s", "data_workers", "loaders", "probed", "checkpoint_save_s"),
    *("checkpoint_load_s", "evaluation_s", "compile_s", "gc_s", "logging_s", "other_phase_s"),
)

_CLOCKS = ("sm_clock_megahertz", "power_slowed_s", "heat_slowed_s", "power_watts", "stuck_s")
_PORTS = ("coll_detour_s", "coll_congested_s", "coll_degraded_s", "coll_unready_s")

# Columns that are NULL without a source, by the name that `whyidle doctor` has for it.
COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpu_process": (
            "no_process_s",
            "startup_s",
            "startup_read_s",
            "shutdown_s",
            *_MAIN,
            *_LOADER,
        ),
        "process_ids": (
            "no_process_s",
            "startup_s",
            "startup_read_s",
            "shutdown_s",
            *_MAIN,
            *_LOADER,
        ),
        "process": (*_MAIN, *_LOADER, "loader_asked_bytes", "writing_s"),
        "tcp_socket": ("loader_network_ratio",),
        "hidden_processes": (*_MAIN, *_LOADER),
        "other_users": ("loader_read_bytes", "loader_asked_bytes", "writing_s", "read_fs"),
        "probe": _PHASES,
        "file_use": ("read_fs", "read_mount"),
        "mount": ("read_fs", "read_mount"),
        "cgroup_cpu": ("cgroup_throttled_ratio",),
        "cpu": ("node_cpus", "node_cpu_busy_ratio"),
        "pressure": ("loader_thrash_ratio",),
        "vmstat": ("loader_thrash_ratio",),
        "xid": ("xid_s", "xid"),
        "gpu_event": ("xid_s", "xid"),
        "gpu_state": ("pcie_ratio", "pcie_reduced", "pcie_copy_s", "lost_s", "reset_s", *_CLOCKS),
        "gpu_info": ("pcie_ratio", "pcie_reduced", "pcie_copy_s", "sm_clock_max_megahertz"),
        "gds": ("gds_bounced_s",),
        "pcie_gpudirect": ("coll_bounced_s",),
        "rdma_info": ("coll_bounced_s",),
        "gpm": ("coll_s", "coll_wait_s", "coll_transfer_s", "underfilled_s", "pcie_copy_s"),
        "rdma_traffic": _PORTS,
        "rdma_port": (*_PORTS, "rdma_ports"),
        "net_link": ("coll_detour_s", "coll_transport"),
    }
)
# Without these there are no windows, and so nothing at all.
EVERYTHING = frozenset({"gpu_activity", "driver"})
# Another source that tells the same.
INSTEAD: Mapping[str, str] = MappingProxyType({"xid": "gpu_event", "gpu_event": "xid"})


def blind(source: str, working: Collection[str], rules: Sequence[Rule]) -> tuple[str, ...]:
    """Return the ids of the rules that cannot speak while `source` tells nothing."""
    if source in EVERYTHING:
        return tuple(rule.id for rule in rules)
    if INSTEAD.get(source) in working:
        return ()
    missing = set(COLUMNS.get(source, ()))
    return tuple(rule.id for rule in rules if missing & set(rule.reads))
