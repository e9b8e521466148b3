"""The storage of a node as /proc and /sys show it: made up, in the kernel's own formats.

    PYTHONPATH=tests python -m storage_tree     writes fixtures/tree/storage-synthetic anew

No recorded tree has NVMe over TCP or RDMA with ANA, nor all kinds of file systems on one node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trees import FIXTURES, write

FOLDER = FIXTURES / "storage-synthetic"
_SUBSYSTEMS = "sys/devices/virtual/nvme-subsystem"


@dataclass(slots=True)
class Tree:
    """Files by name with their text, and links by name with the place that they lead to."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def attributes(self, place: str, **values: object) -> None:
        """One file for each attribute of a device."""
        for name, value in values.items():
            self.files[f"{place}/{name}"] = f"{value}\n"

    def put(self, root: Path) -> None:
        """Write it below `root`; links are relative, as in sysfs."""
        write(root, self.files)
        for name, target in self.links.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(os.path.relpath(target, Path(name).parent))


def _disk(tree: Tree, place: str, number: str, sectors: int, nsid: int | None = None) -> None:
    name = place.rpartition("/")[2]
    tree.attributes(place, dev=number, size=sectors)
    if nsid is not None:
        tree.attributes(place, nsid=nsid)
    tree.links[f"sys/dev/block/{number}"] = place
    tree.links[f"sys/class/block/{name}"] = place
    if "/block/" in place or "/nvme" in place:
        tree.links[f"sys/block/{name}"] = place


def _partition(tree: Tree, disk: str, number: str, index: int) -> None:
    name = f"{disk.rpartition('/')[2]}p{index}"
    place = f"{disk}/{name}"
    tree.attributes(place, dev=number, size=4096, partition=index)
    tree.links[f"sys/dev/block/{number}"] = place
    tree.links[f"sys/class/block/{name}"] = place


def _controller(tree: Tree, number: int, subsystem: int, place: str, **more: object) -> str:
    directory = f"{place}/nvme{number}"
    attributes = {
        "state": "live",
        "model": "Synthetic NVMe drive                    ",
        "serial": f"SYN{number:05}            ",
        "firmware_rev": "1.0     ",
        "cntlid": number + 1,
        "cntrltype": "io",
        "subsysnqn": f"nqn.2024-01.test.synthetic:subsystem{subsystem}",
        **more,
    }
    tree.attributes(directory, **attributes)
    tree.links[f"sys/class/nvme/nvme{number}"] = directory
    own = f"{_SUBSYSTEMS}/nvme-subsys{subsystem}"
    tree.attributes(own, subsysnqn=attributes["subsysnqn"], iopolicy="numa")
    tree.links[f"sys/class/nvme-subsystem/nvme-subsys{subsystem}"] = own
    tree.links[f"{own}/nvme{number}"] = directory
    return directory


def local_drive(tree: Tree) -> None:
    """nvme0: a drive in a PCIe slot, partitioned, without multipath."""
    place = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/nvme"
    own = _controller(
        tree,
        0,
        0,
        place,
        transport="pcie",
        address="0000:01:00.0",
        numa_node=1,
        queue_count=33,
        sqsize=1023,
        kato=0,
    )
    disk = f"{own}/nvme0n1"
    _disk(tree, disk, "259:0", 7_501_476_528, nsid=1)
    _partition(tree, disk, "259:1", 1)
    _partition(tree, disk, "259:2", 2)


def tcp_target(tree: Tree) -> None:
    """nvme1n1: a namespace over TCP with two paths, of which one is connecting."""
    head = f"{_SUBSYSTEMS}/nvme-subsys1/nvme1n1"
    _disk(tree, head, "259:3", 4_194_304, nsid=7)
    for number, state, ana in ((1, "live", "optimized"), (2, "connecting", "inaccessible")):
        own = _controller(
            tree,
            number,
            1,
            "sys/devices/virtual/nvme-fabrics/ctl",
            state=state,
            transport="tcp",
            address=f"traddr=10.0.{number}.1,trsvcid=4420,src_addr=10.0.{number}.9",
            numa_node=-1,
            queue_count=9,
            sqsize=127,
            kato=5,
            ctrl_loss_tmo=600,
            reconnect_delay=10,
            fast_io_fail_tmo="off",
        )
        path = f"{own}/nvme1c{number}n1"
        tree.attributes(path, ana_state=ana, ana_grpid=number, nsid=7, hidden=1)
        tree.links[f"sys/block/nvme1c{number}n1"] = path
    place = "sys/devices/virtual/block/dm-0"
    tree.attributes(place, size=4096)
    tree.attributes(f"{place}/dm", name="vg0-data")
    tree.links[f"{place}/slaves/nvme1n1"] = head
    tree.links["sys/dev/block/253:0"] = place
    tree.links["sys/class/block/dm-0"] = place
    tree.links["sys/block/dm-0"] = place


def rdma_target(tree: Tree) -> None:
    """nvme2n1: a namespace over RDMA with one path, on a kernel that counts errors."""
    _disk(tree, f"{_SUBSYSTEMS}/nvme-subsys2/nvme2n1", "259:4", 8_388_608, nsid=1)
    tree.attributes(
        f"{_SUBSYSTEMS}/nvme-subsys2/nvme2n1/diag",
        io_requeue_no_usable_path_count=12,
        io_fail_no_available_path_count=0,
    )
    own = _controller(
        tree,
        3,
        2,
        "sys/devices/virtual/nvme-fabrics/ctl",
        transport="rdma",
        address="traddr=10.1.0.1,trsvcid=4420,host_traddr=10.1.0.9",
        numa_node=-1,
        queue_count=5,
        sqsize=127,
        kato=5,
        ctrl_loss_tmo="off",
        reconnect_delay=2,
        fast_io_fail_tmo=15,
    )
    tree.attributes(f"{own}/diag", command_error_count=3, reset_count=1, reconnect_count=4)
    path = f"{own}/nvme2c3n1"
    tree.attributes(path, ana_state="optimized", ana_grpid=1, nsid=1, hidden=1)
    tree.attributes(
        f"{path}/diag", command_retry_count=5, command_error_count=2, multipath_failover_count=1
    )
    tree.links["sys/block/nvme2c3n1"] = path


DISKSTATS = """\
 259       0 nvme0n1 1000 0 80000 500 200 0 1600 60 0 300 560 0 0 0 0 4 9
 259       1 nvme0n1p1 10 0 800 5 2 0 16 1 0 3 6 0 0 0 0 0 0
 259       2 nvme0n1p2 990 0 79200 495 198 0 1584 59 0 297 554 0 0 0 0 4 9
 259       3 nvme1n1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
   0       0 nvme1c1n1 400 0 51200 900 0 0 0 0 0 800 900 0 0 0 0 0 0
   0       0 nvme1c2n1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 259       4 nvme2n1 600 0 76800 1200 0 0 0 0 3 1100 1200 0 0 0 0 0 0
   0       0 nvme2c3n1 600 0 76800 1200 0 0 0 0 3 1100 1200 0 0 0 0 0 0
 253       0 dm-0 400 0 51200 900 0 0 0 0 0 800 900 0 0 0 0 0 0
"""

MOUNTINFO = r"""40 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
41 40 0:5 / /dev rw - devtmpfs udev rw
42 41 0:23 / /dev/shm rw - tmpfs tmpfs rw
43 40 0:21 / /proc rw - proc proc rw
50 40 253:0 / /data rw,noatime - xfs /dev/mapper/vg0-data rw
51 40 259:4 / /scratch\040fast rw - ext4 /dev/nvme2n1 rw
60 40 0:50 / /mnt/nfs rw - nfs4 nas:/train rw,vers=4.1,proto=tcp,addr=10.0.9.1
61 40 0:51 / /mnt/nfs3 rw - nfs nas:/old rw,vers=3,proto=rdma,addr=10.0.9.1
62 40 0:50 /sub /mnt/bind rw - nfs4 nas:/train rw,vers=4.1,proto=tcp,addr=10.0.9.1
63 40 0:52 / /lustre rw - lustre 10.2.0.1@o2ib:10.2.0.2@o2ib:/syn rw,flock
64 40 0:53 / /beegfs rw - beegfs beegfs_nodev rw
65 40 0:54 / /gpfs rw - gpfs gpfs0 rw
66 40 0:55 / /ceph rw - ceph 10.3.0.1:6789:/ rw,name=admin,secret=<hidden>
67 40 0:60 / /bucket rw - fuse.s3fs s3fs rw,user_id=0,group_id=0,allow_other
68 40 0:61 / /sshfs rw - fuse.sshfs me@far:/x rw,user_id=0,group_id=0
69 40 0:62 / /c rw - overlay overlay rw,lowerdir=/var/l/1:/var/l/2,upperdir=/var/u,workdir=/var/w
"""


def devices(tree: Tree) -> None:
    """Disks and mounts."""
    tree.files["proc/diskstats"] = DISKSTATS
    tree.files["proc/self/mountinfo"] = MOUNTINFO
    tree.files["sys/module/nvme_core/parameters/io_timeout"] = "30\n"


_EVENTS = "10 20 1 2 30 40 50 0 60 70 0 80 5 0 90 3 0 30 0 0 0 0 0 0 4 0 0"
_NFS = """device nas:/train mounted on /mnt/nfs with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.1,rsize=1048576,wsize=1048576,hard,proto=tcp,nconnect=2,timeo=600,sec=sys
\tage:\t7200
\tcaps:\tcaps=0x3ffdf,wtmult=512,dtsize=32768,bsize=0,namlen=255
\tevents:\t{events}
\tbytes:\t5000000000 1000000 0 0 4000000000 1000000 976563 245
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 801 0 1 0 0 50000 49998 0 90000 1200 16 4000 3000
\txprt:\ttcp 802 0 3 1 0 50010 50010 0 90500 1100 16 4100 3100
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 1 1 0
\t        READ: 60000 60012 3 12000000 4010000000 90000 600000 700000 0
\t       WRITE: 100 100 0 1020000 16000 5 200 210 0
\t        OPEN: 3000 3000 0 900000 1200000 30 3000 3100 0
\t     GETATTR: 36909 36909 0 7000000 8000000 40 20000 21000 2
\t     READDIR: 0 0 0 0 0 0 0 0 0

"""
_NFS3 = """device nas:/old mounted on /mnt/nfs3 with fstype nfs statvers=1.1
\topts:\trw,vers=3,rsize=65536,wsize=65536,soft,proto=rdma,port=20049,timeo=600,retrans=2,sec=sys
\tage:\t3600
\tcaps:\tcaps=0x3fcf,wtmult=4096,dtsize=65536,bsize=0,namlen=255
\tevents:\t{events}
\tbytes:\t100 0 0 0 100 0 1 0
\tRPC iostats version: 1.0  p/v: 100003/3 (nfs)
\txprt:\trdma 0 0 2 0 5 40 40 0 44 1 10 2 0 8192 4096 0 30 1 2 0 0 0 0 20 9 0 0
\tper-op statistics
\t        NULL: 1 1 0 40 24 0 1 1
\t        READ: 3 3 0 312 5472 0 1 1

"""


def nfs(tree: Tree) -> None:
    """Two mounts, of which one is bound a second time."""
    first = _NFS.format(events=_EVENTS)
    tree.files["proc/self/mountstats"] = (
        "device proc mounted on /proc with fstype proc\n"
        + first
        + first.replace("/mnt/nfs", "/mnt/bind")
        + _NFS3.format(events=_EVENTS)
    )


_LLITE = """snapshot_time             1710759783.271040288 secs.nsecs
read_bytes                1000 samples [bytes] 4096 1048576 900000000 850000000000000
write_bytes               50 samples [bytes] 4096 1048576 50000000 50000000000000
read                      1000 samples [usecs] 20 90000 4000000 90000000000
write                     50 samples [usecs] 30 5000 60000 90000000
open                      200 samples [usecs] 100 9000 100000 90000000
getattr                   400 samples [usecs] 1 900 20000 9000000
inode_permission          900 samples [usecs] 0 9 100 900
"""
_OSC = """snapshot_time             1710759783.271040288 secs.nsecs
req_waittime              900 samples [usec] 50 80000 3600000 80000000000
req_active                900 samples [reqs] 1 9 2700 9000
read_bytes                700 samples [bytes] 4096 4194304 700000000 900000000000000
ost_read                  700 samples [usec] 100 80000 3000000 80000000000
obd_ping                  10 samples [usec] 100 200 1500 300000
"""
_IMPORT = """import:
    name: syn-OST000{number}-osc-ffff9f0000000000
    target: syn-OST000{number}_UUID
    state: {state}
    connect_flags: [ write_grant, server_lock, version ]
    connection:
       failover_nids: [ "10.2.0.1@o2ib", "10.2.0.2@o2ib" ]
       current_connection: "10.2.0.{number}@o2ib"
       connection_attempts: {number}
    rpcs:
       inflight: 8
       unregistering: 0
       timeouts: {number}
       avg_waittime: 6054 usec
"""


def lustre(tree: Tree) -> None:
    """A client of 2.14: two data targets, of which one is cut off, and one for names."""
    base = "sys/kernel/debug/lustre"
    tree.files[f"{base}/llite/syn-ffff9f0000000000/stats"] = _LLITE
    for number, state in ((1, "FULL"), (2, "DISCONN")):
        own = f"{base}/osc/syn-OST000{number}-osc-ffff9f0000000000"
        tree.files[f"{own}/stats"] = _OSC
        tree.files[f"{own}/import"] = _IMPORT.format(number=number, state=state)
    tree.files[f"{base}/mdc/syn-MDT0000-mdc-ffff9f0000000000/stats"] = (
        "snapshot_time             1710759783.271040288 secs.nsecs\n"
        "req_waittime              30 samples [usec] 50 800 3600 900000\n"
    )


def fuse(tree: Tree) -> None:
    """Two connections of which one has requests waiting."""
    for number, waiting in ((60, 7), (61, 0)):
        tree.attributes(
            f"sys/fs/fuse/connections/{number}",
            waiting=waiting,
            max_background=12,
            congestion_threshold=9,
        )


_GDS = """GDS Version: 1.11.0.15
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.22.3)
Mellanox PeerDirect Supported: True
IO stats: Enabled, peer IO stats: Disabled
Logging level: info

Active Shadow-Buffer (MiB): 128
Active Process: 2
Batches              : n=10 ok=9 err=1 Avg-Submit-Latency(usec)=12
Reads                : n=4096 ok=4095 err=1 readMiB=4095 io_state_err=0
Reads                : Bandwidth(MiB/s)=2048 Avg-Latency(usec)=450
Sparse Reads         : n=0 io=0 holes=0 pages=0
Writes               : n=64 ok=64 err=0 writeMiB=64 io_state_err=0 pg-cache=3 pg-cache-fail=0 \
pg-cache-eio=0
Writes               : Bandwidth(MiB/s)=512 Avg-Latency(usec)=900
Mmap                 : n=8 ok=8 err=0 munmap=6
Bar1-map             : n=8 ok=8 err=0 free=6 callbacks=0 active=2 delay-frees=0
Error                : cpu-gpu-pages=0 sg-ext=0 dma-map=2 dma-ref=0
Ops                  : Read=3 Write=0 BatchIO=1
GPU 0000:19:00.0  uuid:12a86a5e-3002-108f-ee49-4b51266cdc07 : Registered_MiB=32 Cache_MiB=16 \
max_pinned_MiB=64 cross_root_port(%)=25
"""
_PEERS = """gpu           peer          peerrank  p2pdist link gen  numa np2p class
0000:19:00.0  0000:1a:00.0  0x20008   0x2     0x4  0x4  0x0  0    nvme
0000:19:00.0  0000:9a:00.0  0x820088  0x82    0x10 0x5  0x1  0    network
"""


def gds(tree: Tree) -> None:
    """GPUDirect Storage with its statistics on."""
    tree.files["proc/driver/nvidia-fs/stats"] = _GDS
    tree.files["proc/driver/nvidia-fs/peer_distance"] = _PEERS


_CEPH = """\
item          total       avg_lat(us)     min_lat(us)     max_lat(us)     stdev(us)
-----------------------------------------------------------------------------------
read          1200        9000            1000            100000          607
write         0           0               0               0               0
"""
_WEKA = """\
IO type:            UM Average      UM Longest      KM Average      KM Longest      IO count
----------------------------------------------------------------------------------------------
read:               117 us          3105 us         6485 ns         436709 ns       4079 (1204)
write:              0 us            0 us            0 ns            0 ns            0
"""


def parallel_fs(tree: Tree) -> None:
    """A client of Ceph and one of Weka."""
    tree.files["sys/kernel/debug/ceph/11111111-synthetic.client7/metrics/latency"] = _CEPH
    tree.files["sys/kernel/debug/ceph/11111111-synthetic.client7/metrics/size"] = ""
    tree.files["proc/wekafs/stat"] = _WEKA


PARTS: tuple[Callable[[Tree], None], ...] = (
    local_drive,
    tcp_target,
    rdma_target,
    devices,
    nfs,
    lustre,
    fuse,
    gds,
    parallel_fs,
)


def node() -> Tree:
    """The whole node."""
    tree = Tree()
    for part in PARTS:
        part(tree)
    return tree


def main() -> None:
    """Write the fixture anew; a link is a file of its target, as archives do not keep links."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    tree = node()
    targets = {
        name: os.path.relpath(target, Path(name).parent) for name, target in tree.links.items()
    }
    write(FOLDER, {**tree.files, **targets})


if __name__ == "__main__":
    main()
