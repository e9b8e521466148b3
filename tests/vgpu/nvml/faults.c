/* Faults on demand, waiting without polling, and call counts. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

uint64_t standin_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t standin_timestamp_us(uint64_t mono_ns) {
    return (mono_ns + standin_state()->epoch_offset_ns) / 1000;
}

static struct timespec timespec_of(uint64_t ns) {
    return (struct timespec){.tv_sec = (time_t)(ns / NS_PER_S), .tv_nsec = (long)(ns % NS_PER_S)};
}

void standin_sleep_ns(uint64_t ns) {
    struct timespec until = timespec_of(standin_now_ns() + ns);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
    }
}

void standin_wait_change(struct standin_state *state, uint32_t seen, uint64_t deadline_ns) {
    uint64_t now = standin_now_ns();
    if (now >= deadline_ns)
        return;
    /* At most a second at a time: a writer that cannot call futex is still seen. */
    uint64_t wait_ns = deadline_ns - now < NS_PER_S ? deadline_ns - now : NS_PER_S;
    struct timespec timeout = timespec_of(wait_ns);
    syscall(SYS_futex, &state->wake, FUTEX_WAIT, seen, &timeout, NULL, 0);
}

static bool armed(const struct standin_fault *fault, uint32_t serial) {
    return __atomic_load_n(&fault->active, __ATOMIC_ACQUIRE) != 0 &&
           __atomic_load_n(&fault->serial, __ATOMIC_ACQUIRE) == serial;
}

static void block(struct standin_state *state, struct standin_fault *fault, uint32_t serial) {
    uint64_t begin = standin_now_ns();
    uint64_t deadline = fault->block_ns == STANDIN_FOREVER ? STANDIN_FOREVER : begin + fault->block_ns;
    standin_blocked(state, 1);
    for (;;) {
        uint32_t seen = __atomic_load_n(&state->wake, __ATOMIC_ACQUIRE);
        if (!armed(fault, serial) || standin_now_ns() >= deadline)
            break;
        standin_wait_change(state, seen, deadline);
    }
    standin_blocked(state, -1);
}

/* Takes one of the calls that a limited fault may still hit. */
static bool take(struct standin_fault *fault) {
    int32_t left = __atomic_load_n(&fault->remaining, __ATOMIC_ACQUIRE);
    while (left > 0) {
        if (__atomic_compare_exchange_n(&fault->remaining, &left, left - 1, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return true;
    }
    return left < 0;
}

static bool matches(const struct standin_fault *fault, const char *name, uint32_t slot, bool driver) {
    if (fault->gpu != STANDIN_ANY_GPU && fault->gpu != slot)
        return false;
    if (fault->function[0] == '\0')
        return driver;
    return strncmp(fault->function, name, sizeof fault->function) == 0;
}

void standin_count(enum function_id fn) {
    struct standin_state *state = standin_state();
    if (state != NULL)
        __atomic_add_fetch(&state->calls[fn].count, 1, __ATOMIC_RELAXED);
}

nvmlReturn_t standin_fault(enum function_id fn, uint32_t slot, bool driver) {
    struct standin_state *state = standin_state();
    const struct standin_calls *calls = &state->calls[fn];
    standin_count(fn);
    if (__atomic_load_n(&state->fault_count, __ATOMIC_ACQUIRE) == 0)
        return NVML_SUCCESS;
    for (uint32_t i = 0; i < STANDIN_FAULTS; i++) {
        struct standin_fault *fault = &state->faults[i];
        uint32_t serial = __atomic_load_n(&fault->serial, __ATOMIC_ACQUIRE);
        if (!armed(fault, serial) || !matches(fault, calls->function, slot, driver))
            continue;
        if (!take(fault))
            continue;
        nvmlReturn_t code = (nvmlReturn_t)fault->code;
        if (fault->block_ns != 0)
            block(state, fault, serial);
        if (code != NVML_SUCCESS)
            return code;
    }
    return NVML_SUCCESS;
}
