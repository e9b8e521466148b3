/*
 * The shared state of the stand-in NVML library: one file, mapped by the library and by its writer.
 *
 * tests/vgpu/layout.py declares the same structures for Python; tests/test_standin_nvml_build.py asks
 * the compiler for every offset and compares. Units last in names. Natural alignment, no pointers.
 *
 * Who writes what. The writer (Python, under an exclusive lock of the file) writes everything but:
 * `calls`, `blocked`, a fault's `remaining`. Those belong to the library, which updates them atomically.
 *
 * Torn reads. A GPU's counters and gauges stand under `seq`: odd while the writer is inside. Readers
 * retry, a bounded number of times, so that a writer that died cannot hang them.
 */
#ifndef STANDIN_STATE_H
#define STANDIN_STATE_H

#include <stdint.h>

#define STANDIN_MAGIC 0x4c4d564e4e415453ULL /* "STANNVML" in little-endian byte order */
#define STANDIN_VERSION 1u

enum {
    STANDIN_GPUS = 16,
    STANDIN_LINKS = 36,     /* NVML_NVLINK_MAX_LINKS of nvml.h 13.5 */
    STANDIN_PROCESSES = 64, /* per GPU */
    STANDIN_MIGS = 8,       /* per GPU */
    STANDIN_FAULTS = 32,
    STANDIN_EVENTS = 256,
    STANDIN_FUNCTIONS = 192,
    STANDIN_SLOTS = 128, /* sample history per GPU; the driver's rings hold 72 to 100 */
    STANDIN_METRICS = 512, /* above every metric and field id */
};

/* "This device does not have it": the library answers NVML_ERROR_NOT_SUPPORTED. */
#define STANDIN_ABSENT 0xFFFFFFFFu
#define STANDIN_ANY_GPU 0xFFFFFFFFu
#define STANDIN_FOREVER 0xFFFFFFFFFFFFFFFFULL

/*
 * A cumulative quantity that advances by itself. At CLOCK_MONOTONIC time t its value is
 *     value + rate_per_s * (min(t, until_ns) - at_ns) / 1e9,     never before at_ns.
 * until_ns = 0: no end. Times of activity are in ns: 60 % busy is a rate of 6e8.
 */
struct standin_counter {
    int64_t value;
    double rate_per_s;
    uint64_t at_ns;
    uint64_t until_ns;
};

/* Counters of one GPU. The first STANDIN_ACTIVITIES of them exist for MIG instances too. */
enum standin_counter_id {
    STANDIN_GR,        /* ns in which some kernel was resident */
    STANDIN_SM,        /* ns times the share of SMs that were busy */
    STANDIN_OCCUPANCY, /* ns times the share of warps */
    STANDIN_INTEGER,
    STANDIN_TENSOR, /* any tensor pipe */
    STANDIN_DFMA,
    STANDIN_HMMA,
    STANDIN_DMMA,
    STANDIN_IMMA,
    STANDIN_DRAM, /* ns times the share of the theoretical bandwidth */
    STANDIN_FP64,
    STANDIN_FP32,
    STANDIN_FP16,
    STANDIN_ACTIVITIES,
    STANDIN_MEM = STANDIN_ACTIVITIES, /* ns in which memory was read or written (utilization.memory) */
    STANDIN_ENC,
    STANDIN_DEC,
    STANDIN_JPG,
    STANDIN_OFA,
    STANDIN_ENERGY_MJ,
    STANDIN_PCIE_TX, /* bytes, from the GPU */
    STANDIN_PCIE_RX, /* bytes, to the GPU */
    STANDIN_THROTTLE_POWER, /* ns; the field values of clock event reasons, in their order */
    STANDIN_THROTTLE_THERMAL,
    STANDIN_THROTTLE_SYNC_BOOST,
    STANDIN_THROTTLE_BOARD_LIMIT,
    STANDIN_THROTTLE_LOW_UTILIZATION,
    STANDIN_THROTTLE_RELIABILITY,
    STANDIN_THROTTLE_APP_CLOCKS,
    STANDIN_THROTTLE_BASE_CLOCKS,
    STANDIN_THROTTLE_SW_THERMAL,
    STANDIN_THROTTLE_HW_THERMAL,
    STANDIN_THROTTLE_HW_POWER_BRAKE,
    STANDIN_C2C_TX, /* bytes, from the GPU to the CPU of its module */
    STANDIN_C2C_RX,
    STANDIN_NVLINK_TX,                                 /* bytes of data, one counter a link */
    STANDIN_NVLINK_RX = STANDIN_NVLINK_TX + STANDIN_LINKS,
    STANDIN_COUNTERS = STANDIN_NVLINK_RX + STANDIN_LINKS,
};

/*
 * Counters whose history the driver samples: utilization rates, sample rings, average power. `samples`
 * holds their value at the multiples of the sample period, kept up to date by whoever changes a rate.
 */
enum standin_sampled_id {
    STANDIN_SAMPLED_GR,
    STANDIN_SAMPLED_MEM,
    STANDIN_SAMPLED_ENC,
    STANDIN_SAMPLED_DEC,
    STANDIN_SAMPLED_JPG,
    STANDIN_SAMPLED_OFA,
    STANDIN_SAMPLED_ENERGY,
    STANDIN_SAMPLED,
};

/* Values that the driver refreshes every refresh_ns; the library keeps a copy in between. */
struct standin_gauges {
    double temperature_celsius;
    double memory_temperature_celsius;
    uint64_t event_reasons; /* nvmlClocksEventReason bits */
    uint64_t ecc_dram[2][2]; /* [nvmlMemoryErrorType_t][nvmlEccCounterType_t] */
    uint64_t ecc_sram[2][2];
    uint32_t power_mw; /* at this moment; averages come from the energy counter */
    uint32_t power_limit_mw;
    uint32_t power_limit_default_mw;
    uint32_t power_limit_min_mw;
    uint32_t power_limit_max_mw;
    uint32_t clock_mhz[4]; /* graphics, SM, memory, video: nvmlClockType_t */
    uint32_t clock_max_mhz[4];
    uint32_t fan_percent;
    uint32_t pstate;
    uint32_t pcie_generation;
    uint32_t pcie_width;
    uint32_t pcie_replays;
    uint32_t ecc_enabled; /* 0, 1 or absent */
    uint32_t remapped_correctable;
    uint32_t remapped_uncorrectable;
    uint32_t remap_pending;
    uint32_t remap_failure;
    uint32_t recovery_action; /* nvmlDeviceGpuRecoveryAction_t */
    uint32_t persistence;
    uint32_t reserved;
};

struct standin_link {
    uint32_t active; /* nvmlEnableState_t */
    uint32_t replays;
    uint32_t recoveries;
    uint32_t crc_errors;
    uint32_t recoveries_failed; /* this and what follows: Blackwell and newer */
    uint32_t rx_errors;
    uint32_t effective_errors;
    uint32_t symbol_errors;
};

struct standin_process {
    uint64_t used_bytes; /* STANDIN_FOREVER: not available */
    uint32_t pid;
    uint32_t kind; /* 0 compute, 1 graphics, 2 MPS */
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t sm_percent; /* 0 in all of them: no utilization row, as the driver leaves idle ones out */
    uint32_t mem_percent;
    uint32_t enc_percent;
    uint32_t dec_percent;
};

struct standin_mig {
    char uuid[80];
    uint64_t memory_total_bytes;
    uint64_t memory_used_bytes;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t slices;
    uint32_t multiprocessors;
    struct standin_counter counters[STANDIN_ACTIVITIES];
};

struct standin_gpu {
    uint64_t seq;
    /* Identity: written once, before any reader. */
    char name[96];
    char uuid[80];
    char serial[32];
    char part_number[80];
    char vbios[32];
    uint32_t pci_domain;
    uint32_t pci_bus;
    uint32_t pci_device;
    uint32_t pci_device_id;
    uint32_t pci_subsystem_id;
    uint32_t minor;
    uint32_t numa_node;
    uint32_t architecture; /* nvmlDeviceArchitecture_t */
    uint32_t cc_major;
    uint32_t cc_minor;
    uint32_t brand;
    uint32_t module_id;
    uint32_t links;
    uint32_t link_speed_mbps;
    uint32_t nvlink_version;
    uint32_t pcie_generation_max;
    uint32_t pcie_width_max;
    uint32_t multiprocessors;
    /* Conditions. */
    uint32_t lost;        /* nvmlReturn_t of every call that takes a handle; 0: healthy */
    uint32_t gpm;         /* 1: nvmlGpmQueryDeviceSupport says supported */
    uint32_t gpm_return;  /* nvmlReturn_t of taking a GPM sample */
    uint32_t mig_enabled; /* 0, 1 or absent (before Ampere) */
    uint32_t mig_epoch;   /* raised with each new layout: MIG handles of the old one are invalid */
    uint32_t mig_count;
    uint32_t process_count;
    uint32_t c2c; /* 1: it shares a module with a CPU */
    uint8_t gpm_unsupported[STANDIN_METRICS / 8];   /* bit per metric id */
    uint8_t field_unsupported[STANDIN_METRICS / 8]; /* bit per field id: older drivers know fewer */
    uint8_t fabric_cluster[16];
    uint32_t fabric_state; /* nvmlGpuFabricState_t, or absent (before Hopper) */
    uint32_t fabric_clique;
    uint32_t fabric_health_mask;
    uint32_t fabric_health_summary;
    /* Memory changes with every allocation and is not sampled. */
    uint64_t memory_total_bytes;
    uint64_t memory_reserved_bytes;
    uint64_t memory_used_bytes;
    uint64_t bar1_total_bytes;
    uint64_t bar1_used_bytes;
    struct standin_gauges gauges;
    struct standin_link link[STANDIN_LINKS];
    struct standin_process processes[STANDIN_PROCESSES];
    struct standin_mig migs[STANDIN_MIGS];
    struct standin_counter counters[STANDIN_COUNTERS];
    uint64_t samples_slot; /* the last multiple of the sample period that `samples` holds */
    int64_t samples[STANDIN_SAMPLED][STANDIN_SLOTS];
};

/* A call to `function` on `gpu` blocks for block_ns, then returns `code`, or its answer if code is 0. */
struct standin_fault {
    char function[64]; /* empty: every function that would ask the driver */
    uint64_t block_ns; /* STANDIN_FOREVER: until it is cleared */
    uint32_t gpu;      /* slot, or STANDIN_ANY_GPU */
    int32_t code;      /* nvmlReturn_t */
    uint32_t active;   /* written last */
    uint32_t serial;   /* raised each time the entry is armed: a blocked call belongs to one arming */
    int32_t remaining; /* calls still to hit; -1: no limit */
    uint32_t reserved;
};

struct standin_event {
    uint64_t type; /* nvmlEventType bit */
    uint64_t data; /* Xid number for nvmlEventTypeXidCriticalError */
    uint32_t gpu;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t reserved;
};

struct standin_calls {
    char function[56];
    uint64_t count;
};

struct standin_state {
    uint64_t magic;
    uint32_t version;
    uint32_t gpu_count;
    uint64_t size;             /* of this structure */
    uint64_t epoch_offset_ns;  /* CLOCK_REALTIME minus CLOCK_MONOTONIC when the file was made */
    uint64_t refresh_ns;       /* of gauges and of GPM's internal sample; 100 ms in data-centre parts */
    uint64_t sample_period_ns; /* of utilization, 1/6 s to 1 s by product */
    char driver_version[80];
    char nvml_version[80];
    uint32_t cuda_version; /* 1000 * major + 10 * minor */
    uint32_t order_count;
    uint32_t order[STANDIN_GPUS]; /* enumeration order of the slots, read by the first nvmlInit */
    uint32_t wake;                /* futex: raised when a fault is cleared or an event is queued */
    uint32_t blocked;             /* calls that are blocked by a fault now */
    uint32_t fault_count;         /* active faults */
    uint32_t reserved;
    uint64_t event_head; /* events queued since the file was made */
    struct standin_fault faults[STANDIN_FAULTS];
    struct standin_event events[STANDIN_EVENTS];
    struct standin_calls calls[STANDIN_FUNCTIONS];
    struct standin_gpu gpus[STANDIN_GPUS];
};

#endif
