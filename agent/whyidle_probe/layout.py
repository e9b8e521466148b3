"""The counter page: what lies where. The only description of it for whoever writes one.

A page is one file of PAGE_BYTES, little-endian, in slots of 8 bytes that are written whole: an
aligned store is never seen torn. Each slot has one writing thread at a time. Totals only grow.
UNKNOWN in a number slot means that nobody knows. Times are CLOCK_MONOTONIC in ns.

    bytes      what
    0          header: who writes; its checksum is in slot HEADER_CRC
    512        process: slots of the whole process
    1024       loaders: LOADERS blocks of LOADER_SLOTS slots, one a DataLoader
    2560       ring: RING_RECORDS records of RING_BYTES, sequence n in place n % RING_RECORDS
    8192       groups: GROUPS blocks of GROUP_SLOTS slots, one a process group
    10240      calls: CALL_RECORDS records of RING_BYTES, as those of the ring

Version 1 ended after the ring; all that it had lies where it lay. PIPELINE_VIRTUAL was not used.

The reader has a description of its own (whyidle.probe_page): neither package imports the other,
and a test holds the two together.
"""

from __future__ import annotations

MAGIC = b"WHYIDLE\x01"
VERSION = 2
PAGE_BYTES = 16384
SLOT_BYTES = 8
UNKNOWN = -(1 << 63)
SUFFIX = ".page"

# Header, by slot. Magic is written last, so that a page without it is not there yet.
HEADER_BYTES = 512
HEADER_MAGIC = 0
HEADER_VERSION = 1
HEADER_SIZE = 2
HEADER_PID = 3  # in its own pid namespace
HEADER_PID_NAMESPACE = 4  # inode of /proc/self/ns/pid
HEADER_START_NS = 5  # /proc/self/stat, starttime: boot clock
HEADER_USER_ID = 6
HEADER_OPENED_NS = 7
HEADER_RANK = 8
HEADER_WORLD_SIZE = 9
HEADER_LOCAL_RANK = 10
HEADER_PARENT_PID = 11
HEADER_CRC = 63  # crc32 of the bytes after the magic and before this slot

# Header texts: UTF-8, filled up with zero bytes: (offset, bytes).
TEXT_BOOT_ID = (128, 40)
TEXT_PAGE_ID = (168, 32)
TEXT_PYTHON = (200, 24)
TEXT_TORCH = (224, 32)
# Names of phases that a trainer made up, by (kind - PHASE_TOLD).
TEXT_PHASES = (256, 240)
PHASE_NAME_BYTES = 30

# Process, by slot of the page.
STEPS = 64  # UNKNOWN before the first: compiled steps are never counted
OPTIMIZER_STEPS = 65
LAST_STEP_NS = 66  # when the last step ended
PHASE = 67  # kind in the low 4 bits, since when in the others; 0 in none
GC_NS = 68
GC_COUNT = 69
GC_FULL_COUNT = 70  # of the oldest generation
HOOK_ERRORS = 71  # what hooks failed at and kept to themselves
LOADERS_SEEN = 72  # DataLoaders met; more than LOADERS share the last block
CLOSED_NS = 73  # when the process ended in good order, else 0
SEQUENCE = 74  # of the newest ring record, 0 for none
PIPELINE_STAGE = 75  # of this process, from 0
PIPELINE_STAGES = 76  # 0: no pipeline was told of
PIPELINE_BATCHES = 77  # micro-batches of a step
PIPELINE_SCHEDULE = 78  # place in SCHEDULES
PIPELINE_VIRTUAL = 79  # stages that this process runs; 0: one, or not told
# Phases, by kind: time of the main thread, times entered, time of other threads.
PHASE_NS = 80
PHASE_COUNT = 96
PHASE_BACKGROUND_NS = 112
PHASE_KINDS = 16

PHASE_BITS = 4
PHASES = (
    "",
    "checkpoint_save",
    "checkpoint_load",
    "evaluation",
    "compile",
    "logging",
    "setup",
    "other",
)
PHASE_OTHER = 7
PHASE_TOLD = 8  # to 15: named in the header

SCHEDULES = ("", "1f1b", "gpipe", "other", "interleaved")

# Loaders, by slot of the block.
LOADERS = 8
LOADERS_AT = 128
LOADER_SLOTS = 24
LOADER_SERIAL = 0  # number of the DataLoader in its process, from 1; 0: the block is unused
LOADER_FLAGS = 1
LOADER_WORKERS = 2
LOADER_CAPACITY = 3  # batches that may be under way or ready: workers x prefetch factor
LOADER_BATCH_SIZE = 4
LOADER_WAITING_SINCE_NS = 5  # since when the trainer is in next(), 0: it is not
LOADER_BATCHES = 6  # fetched by the main thread for a step
LOADER_WAIT_NS = 7
LOADER_OUTSIDE_BATCHES = 8  # by the main thread in a phase, or without gradients
LOADER_OUTSIDE_WAIT_NS = 9
LOADER_BACKGROUND_BATCHES = 10  # by any other thread
LOADER_BACKGROUND_WAIT_NS = 11
LOADER_READY = 12  # batches, and notes of iterable workers that ended, when the trainer came last
LOADER_OUTSTANDING = 13  # batches that workers have not delivered, after the last next()
LOADER_UNPINNED = 14  # batches delivered that the pin-memory thread has not taken yet
LOADER_ARRIVED_NS = 15  # when the trainer came last
LOADER_EMPTY_ARRIVALS = 16  # times that it came and nothing was ready
LOADER_READY_SUM = 17  # sum of LOADER_READY over all arrivals
LOADER_ITERATORS = 18  # epochs begun
LOADER_SETUP_NS = 19  # time in iter(): starting workers
LOADER_END_NS = 20  # time in the next() that ended an epoch
LOADER_ENDS = 21

FLAG_WORKERS = 1
FLAG_ITERABLE = 2
FLAG_PIN_MEMORY = 4
FLAG_PERSISTENT = 8
FLAG_SHARED = 16  # the last block, shared by all DataLoaders that found no other

# Ring record, by slot: sequence from 1, kind, begin, end, three values, crc32 of what is before.
RING_AT_BYTES = 2560
RING_BYTES = 64
RING_RECORDS = 88
EVENT_STEP = 32  # values: steps so far, data wait in ns, batches since the last record
EVENT_GC = 33  # values: generation, objects collected, 0
EVENT_WAIT = 34  # the main thread waited for a DataLoader; values: steps so far, 0, 0
EVENT_SETUP = 35  # it began or ended an epoch of a DataLoader; the same values
EVENT_BACKGROUND = 64  # added to a phase's kind when it ran in another thread

# Process groups, by slot of the block. Collectives are counted by all members alike, in the order
# in which they are called: the number of one is its name on every rank.
GROUPS = 16
GROUPS_AT = 1024
GROUP_SLOTS = 16
GROUP_SERIAL = 0  # number of the group in its process, from 1; 0: the block is unused
GROUP_KEY = 1  # of its name and its ranks, alike on all of them; UNKNOWN: several share the block
GROUP_SIZE = 2
GROUP_RANK = 3  # of this process in it
GROUP_BACKEND = 4  # place in BACKENDS
GROUP_CALLS = 5  # collectives called by Python
GROUP_MESSAGES = 6  # sends and receives called by Python
GROUP_MOVED_BYTES = 7  # of the tensors given to both
GROUP_WAITS = 8  # times that the main thread waited for one to end
GROUP_WAIT_NS = 9  # for collectives, and for gradients that DDP reduces on CPUs
GROUP_MESSAGE_WAIT_NS = 10  # for sends and receives
GROUP_WAITING_SINCE_NS = 11  # since when the main thread waits, 0: it does not
GROUP_ARRIVED_NS = 12  # when a collective was called last
GROUP_OPERATION = 13  # which one, place in OPERATIONS
GROUP_BACKWARDS = 14  # backward passes of DDP modules on CPUs that reduced gradients

BACKENDS = ("", "gloo", "nccl", "mpi", "ucc", "other")
OPERATIONS = (
    "",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
    "coalesced",
    "backward",
)
OPERATION_MESSAGES = (10, 12)  # first and last of those between two ranks
OPERATION_BARRIER = 9
OPERATION_BACKWARD = 13

# Records of calls: sequence from 1; operation, with the serial of its group from bit 8 on and
# CALL_BACKGROUND for another thread than the main one; when it was called; when it ended for the
# caller; its number in the group; ns that the caller waited; bytes; crc32 of what is before.
# Recorded are long waits, and every 2 ** n-th call, so that ranks tell of the same ones.
CALLS_AT_BYTES = 10240
CALL_RECORDS = 96
CALL_BACKGROUND = 1 << 16
CALL_SEQUENCE = 1279  # of the newest call record, 0 for none; the one unused slot of the last block
