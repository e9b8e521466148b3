/* Event sets: what happens to a device after it was registered. No history, no timestamps. */
#include <pthread.h>
#include <stdlib.h>

#include "standin.h"

#define EVENT_SET_MAGIC 0x45565453u
#define SUPPORTED                                                                                    \
    (nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError | nvmlEventTypeXidCriticalError | \
     nvmlEventTypeClock)

struct nvmlEventSet_st {
    uint32_t magic;
    pthread_mutex_t lock;
    uint64_t next; /* position in the queue */
    uint64_t types[STANDIN_GPUS];
    uint64_t since[STANDIN_GPUS]; /* events before this position came before registration */
};

static uint64_t head(void) {
    return __atomic_load_n(&standin_state()->event_head, __ATOMIC_ACQUIRE);
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    ENTER(nvmlEventSetCreate);
    REQUIRE(set != NULL);
    struct nvmlEventSet_st *made = calloc(1, sizeof *made);
    if (made == NULL)
        return NVML_ERROR_MEMORY;
    made->magic = EVENT_SET_MAGIC;
    pthread_mutex_init(&made->lock, NULL);
    made->next = head();
    *set = made;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    standin_count(FN_nvmlEventSetFree); /* without nvmlInit too */
    REQUIRE(set != NULL && set->magic == EVENT_SET_MAGIC);
    set->magic = 0;
    pthread_mutex_destroy(&set->lock);
    free(set);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t handle, unsigned long long *types) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetSupportedEventTypes, handle, &d);
    REQUIRE(types != NULL);
    *types = SUPPORTED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t handle, unsigned long long types,
                                      nvmlEventSet_t set) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceRegisterEvents, handle, &d);
    REQUIRE(set != NULL && set->magic == EVENT_SET_MAGIC && types != 0);
    REQUIRE_SUPPORT((types & ~(unsigned long long)SUPPORTED) == 0 && d.mig == NULL);
    pthread_mutex_lock(&set->lock);
    if (set->types[d.slot] == 0)
        set->since[d.slot] = head();
    set->types[d.slot] |= types;
    pthread_mutex_unlock(&set->lock);
    return NVML_SUCCESS;
}

/* The next event of the set, if there is one. */
static bool pop(struct nvmlEventSet_st *set, struct standin_event *event) {
    const struct standin_state *state = standin_state();
    bool found = false;
    pthread_mutex_lock(&set->lock);
    uint64_t end = head();
    if (end - set->next > STANDIN_EVENTS) /* overrun: the oldest are gone */
        set->next = end - STANDIN_EVENTS;
    while (!found && set->next < end) {
        uint64_t position = set->next++;
        *event = state->events[position % STANDIN_EVENTS];
        found = event->gpu < STANDIN_GPUS && (set->types[event->gpu] & event->type) != 0 &&
                position >= set->since[event->gpu];
    }
    pthread_mutex_unlock(&set->lock);
    return found;
}

static bool lost_one(const struct nvmlEventSet_st *set) {
    const struct standin_state *state = standin_state();
    for (uint32_t slot = 0; slot < state->gpu_count; slot++) {
        uint32_t lost = __atomic_load_n(&state->gpus[slot].lost, __ATOMIC_ACQUIRE);
        if (set->types[slot] != 0 && lost == NVML_ERROR_GPU_IS_LOST)
            return true;
    }
    return false;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
    ENTER(nvmlEventSetWait_v2);
    REQUIRE(set != NULL && set->magic == EVENT_SET_MAGIC && data != NULL);
    struct standin_state *state = standin_state();
    uint64_t deadline_ns = standin_now_ns() + timeout_ms * NS_PER_MS;
    struct standin_event event;
    for (;;) {
        uint32_t seen = __atomic_load_n(&state->wake, __ATOMIC_ACQUIRE);
        if (pop(set, &event))
            break;
        if (lost_one(set))
            return NVML_ERROR_GPU_IS_LOST;
        if (standin_now_ns() >= deadline_ns)
            return NVML_ERROR_TIMEOUT;
        standin_wait_change(state, seen, deadline_ns);
    }
    *data = (nvmlEventData_t){
        .device = standin_handle(event.gpu),
        .eventType = event.type,
        .eventData = event.data,
        .gpuInstanceId = event.gpu_instance,
        .computeInstanceId = event.compute_instance,
    };
    return NVML_SUCCESS;
}
