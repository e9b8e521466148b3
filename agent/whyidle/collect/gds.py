"""GPUDirect Storage: whether it is used, and how much it moved if its statistics are on.

Source: /proc/driver/nvidia-fs/{stats,peer_distance}. Statistics are off unless the module's
rw_stats_enabled is set: what they would count is NULL then, not 0. Nothing is written there:
a write clears all counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.gds_text import Gpu, Peer, Stats, parse_peers, parse_stats
from whyidle.host import Host
from whyidle.schema import Gds, GdsGpu, GdsPeer

_FOLDER = "proc/driver/nvidia-fs"
# Its totals are coarse, and parsing its text costs 0.2 ms.
_EVERY_S = 5.0
_AGAIN_NS = 60 * NS_PER_S
# The module is loaded once, if ever.
_NONE_AGAIN_NS = 10 * NS_PER_S
_NO_MODULE = "the nvidia-fs module is not loaded (no /proc/driver/nvidia-fs)"

GdsRow: TypeAlias = "Gds | GdsGpu | GdsPeer"


def make() -> Collect:
    """Return the collector."""
    told_ns: int | None = None
    none_until_ns = 0

    def collect(host: Host) -> Iterator[GdsRow | Problem]:
        nonlocal told_ns, none_until_ns
        now_ns = host.clock.mono_ns()
        if now_ns < none_until_ns:
            raise NoData(_NO_MODULE)
        try:
            stats = parse_stats(host.read(f"{_FOLDER}/stats"))
        except FileNotFoundError:
            none_until_ns = now_ns + _NONE_AGAIN_NS
            raise NoData(_NO_MODULE) from None
        mono_ns = host.clock.mono_ns()
        yield _row(stats, mono_ns)
        again = told_ns is None or now_ns - told_ns >= _AGAIN_NS
        if again or stats.processes:
            for gpu in stats.gpus:
                yield _gpu(gpu, mono_ns)
        if again:
            told_ns = now_ns
            yield from _peers(host)

    return collect


def _row(stats: Stats, mono_ns: int) -> Gds:
    running = [stats.number("Ops", name) for name in ("Read", "Write", "BatchIO")]
    failed = [stats.number("Error", name) for name in ("cpu-gpu-pages", "sg-ext", "dma-map")]
    known = [number for number in running if number is not None]
    errors = [number for number in failed if number is not None]
    return Gds(
        mono_ns=mono_ns,
        version=stats.version,
        driver=stats.driver,
        io_stats=stats.io_stats,
        peer_stats=stats.peer_stats,
        processes=stats.processes,
        shadow_buffer_bytes=stats.shadow_buffer_bytes,
        reads=stats.io("Reads", "n"),
        reads_done=stats.io("Reads", "ok"),
        # Errors are counted in any case.
        read_errors=stats.number("Reads", "err"),
        read_bytes=stats.io_bytes("Reads", "readMiB", "readMB"),
        read_state_errors=stats.number("Reads", "io_state_err"),
        writes=stats.io("Writes", "n"),
        writes_done=stats.io("Writes", "ok"),
        write_errors=stats.number("Writes", "err"),
        write_bytes=stats.io_bytes("Writes", "writeMiB", "writeMB"),
        write_state_errors=stats.number("Writes", "io_state_err"),
        batches=stats.io("Batches", "n"),
        batch_errors=stats.io("Batches", "err"),
        page_cache_writes=stats.number("Writes", "pg-cache"),
        map_errors=sum(errors) if errors else None,
        in_progress=sum(known) if known else None,
    )


def _gpu(gpu: Gpu, mono_ns: int) -> GdsGpu:
    return GdsGpu(
        mono_ns=mono_ns,
        gpu=gpu.uuid,
        pci=gpu.pci,
        registered_bytes=gpu.registered_bytes,
        cache_bytes=gpu.cache_bytes,
        max_pinned_bytes=gpu.max_pinned_bytes,
        cross_root_port_ratio=gpu.cross_root_port_ratio,
    )


def _peers(host: Host) -> Iterator[GdsPeer | Problem]:
    try:
        peers: tuple[Peer, ...] = parse_peers(host.read(f"{_FOLDER}/peer_distance"))
    except FileNotFoundError:
        return  # drivers before 2.7 or so
    except (OSError, ValueError) as error:
        yield Problem(subject="peer_distance", message=str(error))
        return
    mono_ns = host.clock.mono_ns()
    for peer in peers:
        yield GdsPeer(
            mono_ns=mono_ns,
            gpu_pci=peer.gpu_pci,
            peer_pci=peer.peer_pci,
            peer_class=peer.peer_class,
            rank=peer.rank,
            distance=peer.distance,
            link_width=peer.link_width,
            link_generation=peer.link_generation,
            numa_node=peer.numa_node,
        )


GDS = Collector(name="gds", lane="normal", make=make, thread="storage", every_s=_EVERY_S)
