"""What an export leaves out: names of people, machines, paths and jobs become pseudonyms.

Each export has a salt of its own that is kept nowhere, so that one name is the same pseudonym all
through an export, in every table, and another one in the next. Numbers and the vocabularies of
kernel, driver and whyidle stay, and so does the diagnosis. What is not listed here as harmless is
replaced: a column that is added later hides its text until somebody says that it may be shown.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from whyidle.table import Column, Table, identifier, quoted

# Columns of text that name nobody and nothing: words of whyidle, of the kernel, of a driver, of a
# vendor; places in the machine that all machines have.
KEPT: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        table: frozenset(columns.split())
        for table, columns in {
            "agent_self": "part",
            "block_device": "device role head",
            "collector_error": "collector kind",
            "device_irq": "pci_bus_id kind device cpus",
            "ethtool_pause": "interface priority",
            "ethtool_port": "interface",
            "file_use": "device kind block_device nvme_transport",
            "fuse_connection": "device fs_type kind",
            "gds": "version driver",
            "gds_gpu": "pci",
            "gds_peer": "gpu_pci peer_pci peer_class",
            "gpu_activity": "source",
            "gpu_distance": "gpu_pci_bus_id device kind pci_bus_id path source",
            "gpu_event": "pci_bus_id kind source",
            "gpu_info": "name architecture compute_capability pci_bus_id driver_version "
            "nvml_version fabric_state fabric_health",
            "gpu_process": "context",
            "ledger_minute": "pool cause subcause",
            "ledger_total": "pool cause subcause",
            "link_event": "interface event operational",
            "lustre_target": "kind state",
            "mount": "device fs_type kind block_device nvme_transport",
            "net_link": "namespace interface",
            "nfs_mount": "device version protocol security",
            "nfs_op": "op",
            "nfs_transport": "protocol",
            "numa_node": "cpus",
            "nvlink": "remote remote_pci",
            "nvme_controller": "controller state transport service model firmware",
            "nvme_namespace": "device controllers transport io_policy",
            "nvme_path": "device namespace controller ana_state",
            "parallel_fs_op": "op",
            "pcie_link": "pci_bus_id kind device upstream iommu",
            "pressure": "resource",
            "probe_info": "python torch pipeline_schedule",
            "process": "kind state wait_channel",
            "process_thread": "state wait_channel",
            "process_info": "kind cpus_allowed numa_allowed net_namespace thread_kinds job_step",
            "rdma_info": "device link_layer transport driver firmware hca_type board_id interfaces "
            "pci_bus_id",
            "rdma_port": "device state physical_state",
            "rdma_traffic": "device",
            "run_info": "gpu_name",
            "settled": "pool cause subcause grade",
            "tcp_socket": "service",
            "tick": "lane collector",
        }.items()
    }
)

# Programs that everybody runs; a name that a job gave itself is another matter.
_PROGRAMS = (
    r"(python[0-9.]*|pt_[a-z_]+|torchrun|accelerate|deepspeed|mpirun|mpiexec|orted|prted|srun|"
    r"slurmstepd|bash|sh|node|java|containerd-shim.*|systemd|nvidia-smi|dcgm.*|nv-hostengine)"
)
_CGROUPS = r"(slurm|system\.slice|user\.slice|init\.scope|kubepods(?:\.slice)?|docker)"
_PHASES = (
    r"(step|gc|data_wait|data_setup|checkpoint_save|checkpoint_load|evaluation|compile|logging|"
    r"setup|other)"
)
_DISKS = r"/dev/(nvme|sd|vd|xvd|md|dm-|loop|nbd|rbd)[a-z0-9]*"
# Words that hold a path, an address or somebody's name, and what a message quotes.
_FOREIGN = r"""('[^']*'|"[^"]*"|\S*[/@\\]\S*|\d+\.\d+\.\d+\.\d+\S*|\S*[0-9a-fA-F]{8}-\S*)"""

Expression = Callable[["Redaction", str], str]


def _exactly(column: str, words: str) -> str:
    return f"regexp_full_match({column}, {quoted(words)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Redaction:
    """The SQL expressions of one export."""

    salt: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def select(self, spec: Table, alias: str) -> str:
        """Return the select list of a table's view, `node` and `boot_id` in front."""
        columns = [
            f"{self.pseudonym(f'{alias}.node', 'node')} AS node",
            f"{self._uuid(f'{alias}.boot_id', quoted(''))} AS boot_id",
            *(self._column(spec.name, column, alias) for column in spec.columns),
        ]
        return ", ".join(columns)

    def _column(self, table: str, column: Column, alias: str) -> str:
        name = f"{alias}.{identifier(column.name)}"
        special = _SPECIAL.get((table, column.name)) or _BY_NAME.get(column.name)
        if special is not None:
            return f"{special(self, name)} AS {identifier(column.name)}"
        if column.type != "VARCHAR" or column.name in KEPT.get(table, frozenset()):
            return name
        return f"{self.pseudonym(name, '')} AS {identifier(column.name)}"

    def pseudonym(self, name: str, prefix: str) -> str:
        """Return an expression of a pseudonym; NULL and '' stay what they are."""
        marked = f"'{prefix}-' || " if prefix else "'~' || "
        return f"CASE WHEN {name} = '' THEN '' ELSE {marked}left({self._digest(name)}, 10) END"

    def _digest(self, name: str) -> str:
        return f"sha256({quoted(self.salt)} || {name})"

    def _uuid(self, name: str, prefix: str) -> str:
        digest = self._digest(name)
        parts = [f"substr({digest}, {at}, {n})" for at, n in _UUID_PARTS]
        body = " || '-' || ".join(parts)
        return f"{prefix} || {body}"

    def gpu(self, name: str) -> str:
        """Return an expression of another GPU's UUID in the same form."""
        return self._uuid(name, f"regexp_extract({name}, '^(GPU-|MIG-|)')")

    def user(self, name: str) -> str:
        """Return an expression of a user's number; root stays root."""
        digits = f"('0x' || left({self._digest(f'{name}::VARCHAR')}, 7))::BIGINT"
        return f"CASE WHEN {name} = 0 THEN 0 ELSE 1000000 + {digits} END"

    def program(self, name: str) -> str:
        """Return an expression of the name of a program, or of a thread that has one."""
        kept = _exactly(name, _PROGRAMS)
        return f"CASE WHEN {kept} THEN {name} ELSE {self.pseudonym(name, 'program')} END"

    def command(self, name: str) -> str:
        """Return an expression of a command line's program and script, by their last names."""
        first = r"^\S*?([A-Za-z0-9_.+-]{1,40})(?:\s|$)"
        named = r"(?:^|[/\s])([A-Za-z0-9_.-]{1,60}\.(?:py|sh))(?:\s|$)"
        program = f"regexp_extract({name}, {quoted(first)}, 1)"
        script = f"regexp_extract({name}, {quoted(named)}, 1)"
        more = f"CASE WHEN {script} IN ('', {program}) THEN '' ELSE ' ' || {script} END"
        return f"{program} || {more}"

    def path(self, name: str) -> str:
        """Return an expression of a path; the root stays."""
        return (
            f"CASE WHEN {name} IN ('', '/') THEN {name} ELSE '/' || {self.pseudonym(name, '')} END"
        )

    def source(self, name: str) -> str:
        """Return an expression of what is mounted: disks, and types that are their own source."""
        kept = f"{_exactly(name, _DISKS)} OR {_exactly(name, 'tmpfs|overlay|proc|sysfs|none')}"
        return f"CASE WHEN {kept} THEN {name} ELSE {self.pseudonym(name, 'source')} END"

    def address(self, name: str) -> str:
        """Return an expression of an address; one on the PCI bus stays."""
        kept = _exactly(name, r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
        return f"CASE WHEN {kept} THEN {name} ELSE {self.pseudonym(name, 'address')} END"

    def cgroup(self, name: str) -> str:
        """Return an expression of a cgroup's path: who made it, and which it is."""
        maker = f"regexp_extract({name}, '^/{_CGROUPS}(?:/|$)', 1)"
        front = f"CASE WHEN {maker} = '' THEN '/' ELSE '/' || {maker} || '/' END"
        which = f"{front} || {self.pseudonym(name, '')}"
        return f"CASE WHEN {name} IN ('', '/') THEN {name} ELSE {which} END"

    def phase(self, name: str) -> str:
        """Return an expression of a phase: one that a trainer made up has a name of its own."""
        kept = _exactly(name, _PHASES)
        return f"CASE WHEN {kept} THEN {name} ELSE {self.pseudonym(name, 'phase')} END"

    def number(self, name: str) -> str:
        """Return an expression of text that is a number, or a pseudonym."""
        kept = _exactly(name, "[0-9]+")
        return f"CASE WHEN {kept} THEN {name} ELSE {self.pseudonym(name, '')} END"

    def said(self, name: str) -> str:
        """Return an expression of a message without what it quotes of others."""
        return f"regexp_replace({name}, {quoted(_FOREIGN)}, '...', 'g')"


_UUID_PARTS = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
_BY_NAME: Mapping[str, Expression] = MappingProxyType(
    {
        "uuid": Redaction.gpu,
        "parent_uuid": Redaction.gpu,
        "user_id": Redaction.user,
        "cgroup": Redaction.cgroup,
        "mount_point": Redaction.path,
        "shares_with": Redaction.path,
    }
)
_SPECIAL: Mapping[tuple[str, str], Expression] = MappingProxyType(
    {
        ("collector_error", "subject"): Redaction.said,
        ("collector_error", "message"): Redaction.said,
        ("gds_gpu", "gpu"): Redaction.gpu,
        ("gpu_event", "process"): Redaction.program,
        ("gpu_event", "text"): Redaction.said,
        ("mount", "root"): Redaction.path,
        ("mount", "source"): Redaction.source,
        ("nfs_mount", "export"): Redaction.path,
        ("nvme_controller", "address"): Redaction.address,
        ("probe", "phase"): Redaction.phase,
        ("probe_event", "kind"): Redaction.phase,
        ("process_info", "comm"): Redaction.program,
        ("process_info", "command"): Redaction.command,
        ("process_thread", "name"): Redaction.program,
        ("settlement", "failure"): Redaction.said,
        ("trace_step", "step"): Redaction.number,
    }
)
