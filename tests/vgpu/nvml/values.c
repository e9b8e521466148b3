/* Reading the state: counters that advance by themselves, their history, and refreshed gauges. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "standin.h"

/* A writer is inside for microseconds. After 5 000 waits of 20 us it is taken for dead. */
#define READ_WAIT_NS 20000ULL
#define READ_WAITS_MAX 5000

uint64_t standin_read_begin(const struct standin_gpu *gpu) {
    uint64_t seq = __atomic_load_n(&gpu->seq, __ATOMIC_ACQUIRE);
    for (int waits = 0; (seq & 1) != 0 && waits < READ_WAITS_MAX; waits++) {
        standin_sleep_ns(READ_WAIT_NS);
        seq = __atomic_load_n(&gpu->seq, __ATOMIC_ACQUIRE);
    }
    return seq;
}

bool standin_read_retry(const struct standin_gpu *gpu, uint64_t seq) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&gpu->seq, __ATOMIC_RELAXED) != seq;
}

int64_t standin_counter_at(const struct standin_counter *counter, uint64_t t_ns) {
    uint64_t end = counter->until_ns != 0 && counter->until_ns < t_ns ? counter->until_ns : t_ns;
    if (end <= counter->at_ns || counter->rate_per_s == 0.0)
        return counter->value;
    return counter->value + llround(counter->rate_per_s * (double)(end - counter->at_ns) / 1e9);
}

int64_t standin_counter(const struct device *device, unsigned int id, uint64_t t_ns) {
    const struct standin_gpu *gpu = device->gpu;
    int64_t value;
    uint64_t seq;
    do {
        seq = standin_read_begin(gpu);
        value = standin_counter_at(&gpu->counters[id], t_ns);
    } while (standin_read_retry(gpu, seq));
    return value;
}

static const unsigned int counter_of_sampled[STANDIN_SAMPLED] = {
    [STANDIN_SAMPLED_GR] = STANDIN_GR,   [STANDIN_SAMPLED_MEM] = STANDIN_MEM,
    [STANDIN_SAMPLED_ENC] = STANDIN_ENC, [STANDIN_SAMPLED_DEC] = STANDIN_DEC,
    [STANDIN_SAMPLED_JPG] = STANDIN_JPG, [STANDIN_SAMPLED_OFA] = STANDIN_OFA,
    [STANDIN_SAMPLED_ENERGY] = STANDIN_ENERGY_MJ,
};

int64_t standin_sampled_at(const struct device *device, unsigned int sampled, uint64_t slot) {
    const struct standin_gpu *gpu = device->gpu;
    uint64_t period = standin_state()->sample_period_ns;
    int64_t value;
    uint64_t seq;
    do {
        seq = standin_read_begin(gpu);
        if (slot <= gpu->samples_slot)
            value = gpu->samples[sampled][slot % STANDIN_SLOTS];
        else
            value = standin_counter_at(&gpu->counters[counter_of_sampled[sampled]], slot * period);
    } while (standin_read_retry(gpu, seq));
    return value;
}

/* The driver's shared page: a copy per GPU, taken anew when it is older than refresh_ns. */
static struct {
    pthread_mutex_t lock;
    const struct standin_state *of; /* the copies belong to this state */
    uint64_t taken_ns[STANDIN_GPUS];
    struct standin_gauges copy[STANDIN_GPUS];
} page = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void refresh(const struct device *device, uint64_t now_ns) {
    const struct standin_gpu *gpu = device->gpu;
    uint64_t seq;
    do {
        seq = standin_read_begin(gpu);
        page.copy[device->slot] = gpu->gauges;
    } while (standin_read_retry(gpu, seq));
    page.taken_ns[device->slot] = now_ns;
}

struct standin_gauges standin_gauges(const struct device *device) {
    const struct standin_state *state = standin_state();
    pthread_mutex_lock(&page.lock);
    if (page.of != state) {
        memset(page.taken_ns, 0, sizeof page.taken_ns);
        page.of = state;
    }
    uint64_t now_ns = standin_now_ns();
    uint64_t taken_ns = page.taken_ns[device->slot];
    if (taken_ns == 0 || now_ns - taken_ns >= state->refresh_ns)
        refresh(device, now_ns);
    struct standin_gauges gauges = page.copy[device->slot];
    pthread_mutex_unlock(&page.lock);
    return gauges;
}

nvmlReturn_t standin_copy_string(const char *from, char *to, unsigned int length) {
    REQUIRE(to != NULL);
    size_t needed = strlen(from) + 1;
    if (length < needed)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(to, from, needed);
    return NVML_SUCCESS;
}
