/* What the parts of the stand-in NVML library share. The official header is included here only. */
#ifndef STANDIN_H
#define STANDIN_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS /* we define both nvmlX and nvmlX_v2 */
#include <nvml.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "functions.h"
#include "state.h"

#define NS_PER_S 1000000000ULL
#define NS_PER_MS 1000000ULL

enum function_id {
#define X(name) FN_##name,
    STANDIN_FUNCTION_LIST(X)
#undef X
        FN_COUNT
};

/* A resolved handle. */
struct device {
    struct standin_gpu *gpu;
    const struct standin_mig *mig; /* NULL: the whole GPU */
    uint32_t slot;
    uint32_t mig_index;
};

/* Entry of a function without a device: counts the call, applies faults, checks nvmlInit. */
nvmlReturn_t standin_enter(enum function_id fn);
/* The same for functions that find a device: `slot` says which faults match, STANDIN_ANY_GPU none. */
nvmlReturn_t standin_enter_slot(enum function_id fn, uint32_t slot);
/* The same for functions that never ask the driver: only a fault that names them applies. */
nvmlReturn_t standin_enter_local(enum function_id fn);
/* Entry with a device: resolves the handle as well; a lost GPU answers with its code. */
nvmlReturn_t standin_enter_device(enum function_id fn, nvmlDevice_t handle, struct device *device);

/* Counts a call and applies the faults that match it; `driver`: faults without a name match too. */
nvmlReturn_t standin_fault(enum function_id fn, uint32_t slot, bool driver);
void standin_count(enum function_id fn);
void standin_blocked(struct standin_state *state, int change);

#define ENTER(name)                                        \
    do {                                                   \
        nvmlReturn_t entered_ = standin_enter(FN_##name);  \
        if (entered_ != NVML_SUCCESS)                      \
            return entered_;                               \
    } while (0)

#define ENTER_LOCAL(name)                                       \
    do {                                                        \
        nvmlReturn_t entered_ = standin_enter_local(FN_##name); \
        if (entered_ != NVML_SUCCESS)                           \
            return entered_;                                    \
    } while (0)

#define ENTER_DEVICE(name, handle, device)                                           \
    do {                                                                             \
        nvmlReturn_t entered_ = standin_enter_device(FN_##name, (handle), (device)); \
        if (entered_ != NVML_SUCCESS)                                                \
            return entered_;                                                         \
    } while (0)

#define REQUIRE(condition)                   \
    do {                                     \
        if (!(condition))                    \
            return NVML_ERROR_INVALID_ARGUMENT; \
    } while (0)

#define REQUIRE_VERSION(actual, expected)                   \
    do {                                                    \
        if ((actual) != (unsigned int)(expected))           \
            return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;    \
    } while (0)

#define REQUIRE_SUPPORT(condition)           \
    do {                                     \
        if (!(condition))                    \
            return NVML_ERROR_NOT_SUPPORTED; \
    } while (0)

/* The mapped state; valid between nvmlInit and nvmlShutdown. */
struct standin_state *standin_state(void);

uint64_t standin_now_ns(void); /* CLOCK_MONOTONIC */
uint64_t standin_timestamp_us(uint64_t mono_ns); /* NVML's timestamps: Unix epoch, by a fixed offset */
void standin_sleep_ns(uint64_t ns);
/* Sleeps until `wake` is no longer `seen` or the time is over. */
void standin_wait_change(struct standin_state *state, uint32_t seen, uint64_t deadline_ns);

/* Optimistic reading of a GPU: do { seq = begin; read; } while (retry(seq)). */
uint64_t standin_read_begin(const struct standin_gpu *gpu);
bool standin_read_retry(const struct standin_gpu *gpu, uint64_t seq);

/* Value at a time. The first takes a counter that the caller reads consistently, the second reads it. */
int64_t standin_counter_at(const struct standin_counter *counter, uint64_t t_ns);
int64_t standin_counter(const struct device *device, unsigned int id, uint64_t t_ns);

/* Value of a sampled counter at a multiple of the sample period: from the history, or extrapolated. */
int64_t standin_sampled_at(const struct device *device, unsigned int sampled, uint64_t slot);

/* The gauges as the driver last refreshed them, at most refresh_ns old. */
struct standin_gauges standin_gauges(const struct device *device);

/* Mean over the last second, from the energy counter. */
uint32_t standin_average_power_mw(const struct device *device);

/* Total of one kind of ECC error; NOT_SUPPORTED while ECC is off. */
nvmlReturn_t standin_ecc_total(const struct standin_gauges *gauges, nvmlMemoryErrorType_t type,
                               nvmlEccCounterType_t scope, unsigned long long *count);

/* Enumeration. */
uint32_t standin_device_count(void);
bool standin_slot_of_index(uint32_t index, uint32_t *slot);
bool standin_index_of_slot(uint32_t slot, uint32_t *index);
nvmlDevice_t standin_handle(uint32_t slot);
nvmlDevice_t standin_mig_handle(uint32_t slot, uint32_t mig_index);

/* Copies a string as NVML does: INSUFFICIENT_SIZE when it does not fit with its end. */
nvmlReturn_t standin_copy_string(const char *from, char *to, unsigned int length);

#endif
