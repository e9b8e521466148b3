/*
 * A writer as fast as C allows against readers of the library: three counters always change together, so
 * every GPM window must show three equal values. Prints how many windows saw a change.
 */
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include "state.h"

/* Reads until that many windows saw a change: how soon depends on who else needs the processors. */
enum { READERS = 2, MOVED = 2000, SECONDS_MAX = 30 };

static volatile int stop;
static unsigned long moved, torn;

static void *write_on(void *argument) {
    struct standin_gpu *gpu = argument;
    static const unsigned int together[] = {STANDIN_GR, STANDIN_SM, STANDIN_DRAM};
    while (!stop) {
        __atomic_add_fetch(&gpu->seq, 1, __ATOMIC_SEQ_CST);
        for (unsigned int i = 0; i < 3; i++)
            __atomic_add_fetch(&gpu->counters[together[i]].value, 1000, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&gpu->seq, 1, __ATOMIC_SEQ_CST);
        for (volatile int pause = 0; pause < 2000; pause++) {
        }
    }
    return NULL;
}

static void *read_on(void *argument) {
    nvmlGpmMetricsGet_t *get = calloc(1, sizeof *get);
    get->version = NVML_GPM_METRICS_GET_VERSION;
    get->numMetrics = 3;
    get->metrics[0].metricId = NVML_GPM_METRIC_GRAPHICS_UTIL;
    get->metrics[1].metricId = NVML_GPM_METRIC_SM_UTIL;
    get->metrics[2].metricId = NVML_GPM_METRIC_DRAM_BW_UTIL;
    nvmlGpmSampleAlloc(&get->sample1);
    nvmlGpmSampleAlloc(&get->sample2);
    time_t end = time(NULL) + SECONDS_MAX;
    while (__atomic_load_n(&moved, __ATOMIC_RELAXED) < MOVED && time(NULL) < end) {
        if (nvmlGpmSampleGet(argument, get->sample1) || nvmlGpmSampleGet(argument, get->sample2) ||
            nvmlGpmMetricsGet(get))
            exit(1);
        double a = get->metrics[0].value, b = get->metrics[1].value, c = get->metrics[2].value;
        if (a > 0)
            __atomic_add_fetch(&moved, 1, __ATOMIC_RELAXED);
        if (!isnan(a) && !(a == b && b == c))
            __atomic_add_fetch(&torn, 1, __ATOMIC_RELAXED);
    }
    nvmlGpmSampleFree(get->sample1);
    nvmlGpmSampleFree(get->sample2);
    free(get);
    return NULL;
}

int main(int count, char **arguments) {
    int fd = count == 2 ? open(arguments[1], O_RDWR) : -1;
    struct standin_state *state =
        mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    nvmlDevice_t device;
    pthread_t writer, readers[READERS];
    if (state == MAP_FAILED || nvmlInit_v2() || nvmlDeviceGetHandleByIndex_v2(0, &device))
        return 1;
    pthread_create(&writer, NULL, write_on, &state->gpus[0]);
    for (int i = 0; i < READERS; i++)
        pthread_create(&readers[i], NULL, read_on, device);
    for (int i = 0; i < READERS; i++)
        pthread_join(readers[i], NULL);
    stop = 1;
    pthread_join(writer, NULL);
    nvmlShutdown();
    munmap(state, sizeof *state);
    close(fd);
    printf("%lu %lu\n", moved, torn);
    return 0;
}
