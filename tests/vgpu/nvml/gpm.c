/*
 * GPM: counters of two moments, and metrics from their difference ("GPM" in nvml.h).
 *
 * A sample takes the cumulative state at the time of the call, unless the last one of that GPU (or GPU
 * instance) is younger than the refresh period: then it gets that one again, as the header's note on
 * intervals under 100 ms has it. A pair without elapsed time gives NaN with NVML_SUCCESS.
 */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define SAMPLE_MAGIC 0x47504d53u
#define BYTES_PER_MIB 1048576.0
#define WHOLE_GPU 0xFFFFFFFFu
#define METRIC_C2C_TOTAL_TX 100u
#define METRIC_C2C_TOTAL_RX 101u
#define METRIC_SM_CYCLES_ELAPSED 248u
#define METRIC_DMMA_TENSOR_UTIL 8u /* the oldest header we build with lacks the name */

struct nvmlGpmSample_st {
    uint32_t magic;
    uint32_t slot;
    uint32_t gpu_instance; /* WHOLE_GPU: not of an instance */
    uint32_t links;
    uint32_t c2c;
    uint64_t taken_ns; /* 0: never filled */
    uint8_t unsupported[STANDIN_METRICS / 8];
    int64_t counters[STANDIN_COUNTERS];
};

/* The internal sample, one per GPU and one per instance of each. */
static struct {
    pthread_mutex_t lock;
    const struct standin_state *of;
    struct nvmlGpmSample_st gpu[STANDIN_GPUS];
    struct nvmlGpmSample_st mig[STANDIN_GPUS][STANDIN_MIGS];
} internal = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void fill(struct nvmlGpmSample_st *sample, const struct device *d) {
    const struct standin_gpu *gpu = d->gpu;
    uint64_t now_ns, seq;
    do {
        seq = standin_read_begin(gpu);
        now_ns = standin_now_ns();
        unsigned int count = d->mig == NULL ? STANDIN_COUNTERS : STANDIN_ACTIVITIES;
        const struct standin_counter *from = d->mig == NULL ? gpu->counters : d->mig->counters;
        for (unsigned int i = 0; i < count; i++)
            sample->counters[i] = standin_counter_at(&from[i], now_ns);
        memcpy(sample->unsupported, gpu->gpm_unsupported, sizeof sample->unsupported);
    } while (standin_read_retry(gpu, seq));
    sample->magic = SAMPLE_MAGIC;
    sample->slot = d->slot;
    sample->gpu_instance = d->mig == NULL ? WHOLE_GPU : d->mig->gpu_instance;
    sample->links = gpu->links;
    sample->c2c = gpu->c2c;
    sample->taken_ns = now_ns;
}

static bool is_current(const struct nvmlGpmSample_st *sample, const struct device *d) {
    uint32_t gpu_instance = d->mig == NULL ? WHOLE_GPU : d->mig->gpu_instance;
    return sample->taken_ns != 0 && sample->gpu_instance == gpu_instance &&
           standin_now_ns() - sample->taken_ns < standin_state()->refresh_ns;
}

static nvmlReturn_t take(const struct device *d, nvmlGpmSample_t to) {
    REQUIRE(to != NULL && to->magic == SAMPLE_MAGIC);
    REQUIRE_SUPPORT(d->gpu->gpm != 0);
    if (d->gpu->gpm_return != NVML_SUCCESS)
        return (nvmlReturn_t)d->gpu->gpm_return;
    pthread_mutex_lock(&internal.lock);
    if (internal.of != standin_state()) {
        memset(internal.gpu, 0, sizeof internal.gpu);
        memset(internal.mig, 0, sizeof internal.mig);
        internal.of = standin_state();
    }
    struct nvmlGpmSample_st *own =
        d->mig == NULL ? &internal.gpu[d->slot] : &internal.mig[d->slot][d->mig_index];
    if (!is_current(own, d))
        fill(own, d);
    *to = *own;
    pthread_mutex_unlock(&internal.lock);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t handle, nvmlGpmSupport_t *support) {
    struct device d;
    ENTER_DEVICE(nvmlGpmQueryDeviceSupport, handle, &d);
    REQUIRE(support != NULL);
    REQUIRE_VERSION(support->version, NVML_GPM_SUPPORT_VERSION);
    support->isSupportedDevice = d.gpu->gpm;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) {
    ENTER_LOCAL(nvmlGpmSampleAlloc);
    REQUIRE(sample != NULL);
    struct nvmlGpmSample_st *made = calloc(1, sizeof *made);
    if (made == NULL)
        return NVML_ERROR_MEMORY;
    made->magic = SAMPLE_MAGIC;
    *sample = made;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) {
    /* Without nvmlInit too: buffers outlive it. */
    standin_count(FN_nvmlGpmSampleFree);
    REQUIRE(sample != NULL && sample->magic == SAMPLE_MAGIC);
    sample->magic = 0;
    free(sample);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t handle, nvmlGpmSample_t sample) {
    struct device d;
    ENTER_DEVICE(nvmlGpmSampleGet, handle, &d);
    return take(&d, sample);
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t handle, unsigned int gpu_instance,
                                 nvmlGpmSample_t sample) {
    struct device d;
    ENTER_DEVICE(nvmlGpmMigSampleGet, handle, &d);
    REQUIRE_SUPPORT(d.gpu->mig_enabled == 1);
    for (uint32_t i = 0; i < d.gpu->mig_count && i < STANDIN_MIGS; i++) {
        if (d.gpu->migs[i].gpu_instance != gpu_instance)
            continue;
        d.mig = &d.gpu->migs[i];
        d.mig_index = i;
        return take(&d, sample);
    }
    return NVML_ERROR_NOT_FOUND;
}

/* A pair of samples under evaluation. */
struct window {
    const struct nvmlGpmSample_st *first;
    const struct nvmlGpmSample_st *second;
    double elapsed_s;
};

static double per_second(const struct window *w, unsigned int counter) {
    return (double)(w->second->counters[counter] - w->first->counters[counter]) / w->elapsed_s;
}

static double percent(const struct window *w, unsigned int counter) {
    return per_second(w, counter) / 1e9 * 100.0; /* the counter holds ns of activity */
}

static double mib_per_second(const struct window *w, unsigned int counter) {
    return per_second(w, counter) / BYTES_PER_MIB;
}

static double all_links(const struct window *w, unsigned int first_counter) {
    double sum = 0.0;
    for (uint32_t link = 0; link < w->second->links; link++)
        sum += mib_per_second(w, first_counter + link);
    return sum;
}

/*
 * Link metrics come in id ranges, receive before transmit. Numbers, because the second range is newer
 * than the oldest header we build with. False: no link metric.
 */
static bool link_metric(unsigned int id, uint32_t *link, bool *transmit) {
    unsigned int offset;
    if (id >= 62 && id <= 97) /* links 0 to 17 */
        offset = id - 62;
    else if (id >= 212 && id <= 247) /* links 18 to 35 */
        offset = id - 212 + 36;
    else
        return false;
    *link = offset / 2;
    *transmit = offset % 2 == 1;
    return true;
}

static nvmlReturn_t describe(nvmlGpmMetric_t *metric, const char *name, const char *unit, double value) {
    /* The header's pointers are not const, but nobody may write through them. */
    metric->metricInfo.shortName = (char *)(uintptr_t)name;
    metric->metricInfo.longName = (char *)(uintptr_t)name;
    metric->metricInfo.unit = (char *)(uintptr_t)unit;
    metric->value = value;
    return NVML_SUCCESS;
}

/* Totals since boot, newer than the oldest header we build with: cycles of a clock of 1 GHz. */
static const struct {
    unsigned int id;
    unsigned int counter;
    const char *unit;
} totals[] = {
    {249, STANDIN_SM, "cycles"},       {250, STANDIN_TENSOR, "cycles"}, {251, STANDIN_DMMA, "cycles"},
    {252, STANDIN_HMMA, "cycles"},     {253, STANDIN_IMMA, "cycles"},   {254, STANDIN_DFMA, "cycles"},
    {255, STANDIN_PCIE_TX, "bytes"},   {256, STANDIN_PCIE_RX, "bytes"}, {257, STANDIN_INTEGER, "cycles"},
    {258, STANDIN_FP64, "cycles"},     {259, STANDIN_FP32, "cycles"},   {260, STANDIN_FP16, "cycles"},
};

static bool total_metric(const struct window *w, nvmlGpmMetric_t *metric) {
    if (metric->metricId == METRIC_SM_CYCLES_ELAPSED)
        return describe(metric, "SM elapsed", "cycles", (double)w->second->taken_ns) == NVML_SUCCESS;
    for (size_t i = 0; i < sizeof totals / sizeof *totals; i++) {
        if (totals[i].id == metric->metricId)
            return describe(metric, "Total", totals[i].unit,
                            (double)w->second->counters[totals[i].counter]) == NVML_SUCCESS;
    }
    return false;
}

static const struct {
    unsigned int id;
    unsigned int counter;
    const char *name;
} activities[] = {
    {NVML_GPM_METRIC_GRAPHICS_UTIL, STANDIN_GR, "Graphics Util"},
    {NVML_GPM_METRIC_SM_UTIL, STANDIN_SM, "SM Util"},
    {NVML_GPM_METRIC_SM_OCCUPANCY, STANDIN_OCCUPANCY, "SM Occupancy"},
    {NVML_GPM_METRIC_INTEGER_UTIL, STANDIN_INTEGER, "Integer Util"},
    {NVML_GPM_METRIC_ANY_TENSOR_UTIL, STANDIN_TENSOR, "Any Tensor Util"},
    {NVML_GPM_METRIC_DFMA_TENSOR_UTIL, STANDIN_DFMA, "DFMA Tensor Util"},
    {NVML_GPM_METRIC_HMMA_TENSOR_UTIL, STANDIN_HMMA, "HMMA Tensor Util"},
    {METRIC_DMMA_TENSOR_UTIL, STANDIN_DMMA, "DMMA Tensor Util"},
    {NVML_GPM_METRIC_IMMA_TENSOR_UTIL, STANDIN_IMMA, "IMMA Tensor Util"},
    {NVML_GPM_METRIC_DRAM_BW_UTIL, STANDIN_DRAM, "DRAM Bandwidth Util"},
    {NVML_GPM_METRIC_FP64_UTIL, STANDIN_FP64, "FP64 Util"},
    {NVML_GPM_METRIC_FP32_UTIL, STANDIN_FP32, "FP32 Util"},
    {NVML_GPM_METRIC_FP16_UTIL, STANDIN_FP16, "FP16 Util"},
    {NVML_GPM_METRIC_NVDEC_0_UTIL, STANDIN_DEC, "NVDEC 0 Util"},
    {NVML_GPM_METRIC_NVJPG_0_UTIL, STANDIN_JPG, "NVJPG 0 Util"},
    {NVML_GPM_METRIC_NVOFA_0_UTIL, STANDIN_OFA, "NVOFA 0 Util"},
};

static nvmlReturn_t activity(const struct window *w, nvmlGpmMetric_t *metric) {
    bool whole = w->second->gpu_instance == WHOLE_GPU;
    for (size_t i = 0; i < sizeof activities / sizeof *activities; i++) {
        if (activities[i].id != metric->metricId)
            continue;
        REQUIRE_SUPPORT(whole || activities[i].counter < STANDIN_ACTIVITIES);
        return describe(metric, activities[i].name, "%", percent(w, activities[i].counter));
    }
    return NVML_ERROR_NOT_SUPPORTED;
}

/* PCIe and NVLink belong to the whole GPU. */
static nvmlReturn_t traffic(const struct window *w, nvmlGpmMetric_t *metric) {
    uint32_t link;
    bool transmit;
    switch (metric->metricId) {
    case NVML_GPM_METRIC_PCIE_TX_PER_SEC:
        return describe(metric, "PCIe TX", "MiB/s", mib_per_second(w, STANDIN_PCIE_TX));
    case NVML_GPM_METRIC_PCIE_RX_PER_SEC:
        return describe(metric, "PCIe RX", "MiB/s", mib_per_second(w, STANDIN_PCIE_RX));
    case NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC:
        REQUIRE_SUPPORT(w->second->links > 0);
        return describe(metric, "NvLink RX", "MiB/s", all_links(w, STANDIN_NVLINK_RX));
    case NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC:
        REQUIRE_SUPPORT(w->second->links > 0);
        return describe(metric, "NvLink TX", "MiB/s", all_links(w, STANDIN_NVLINK_TX));
    case METRIC_C2C_TOTAL_TX:
        REQUIRE_SUPPORT(w->second->c2c != 0);
        return describe(metric, "C2C TX", "MiB/s", mib_per_second(w, STANDIN_C2C_TX));
    case METRIC_C2C_TOTAL_RX:
        REQUIRE_SUPPORT(w->second->c2c != 0);
        return describe(metric, "C2C RX", "MiB/s", mib_per_second(w, STANDIN_C2C_RX));
    default:
        break;
    }
    if (total_metric(w, metric))
        return NVML_SUCCESS;
    if (!link_metric(metric->metricId, &link, &transmit))
        return activity(w, metric);
    REQUIRE_SUPPORT(link < w->second->links);
    unsigned int counter = (transmit ? STANDIN_NVLINK_TX : STANDIN_NVLINK_RX) + link;
    return describe(metric, transmit ? "NvLink link TX" : "NvLink link RX", "MiB/s",
                    mib_per_second(w, counter));
}

static nvmlReturn_t evaluate(const struct window *w, nvmlGpmMetric_t *metric) {
    unsigned int id = metric->metricId;
    REQUIRE(id > 0 && id < STANDIN_METRICS);
    REQUIRE_SUPPORT((w->second->unsupported[id / 8] >> (id % 8) & 1) == 0);
    return w->second->gpu_instance == WHOLE_GPU ? traffic(w, metric) : activity(w, metric);
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get) {
    ENTER_LOCAL(nvmlGpmMetricsGet);
    REQUIRE(get != NULL);
    REQUIRE_VERSION(get->version, NVML_GPM_METRICS_GET_VERSION);
    struct window w = {.first = get->sample1, .second = get->sample2};
    REQUIRE(w.first != NULL && w.first->magic == SAMPLE_MAGIC && w.first->taken_ns != 0);
    REQUIRE(w.second != NULL && w.second->magic == SAMPLE_MAGIC && w.second->taken_ns != 0);
    REQUIRE(w.first->slot == w.second->slot && w.first->gpu_instance == w.second->gpu_instance);
    REQUIRE(get->numMetrics <= STANDIN_METRICS);
    w.elapsed_s = (double)(int64_t)(w.second->taken_ns - w.first->taken_ns) / 1e9;
    if (w.elapsed_s <= 0.0)
        w.elapsed_s = NAN;
    /* Only the entries that were asked for: a caller built against an older header has fewer. */
    for (unsigned int i = 0; i < get->numMetrics; i++)
        get->metrics[i].nvmlReturn = evaluate(&w, &get->metrics[i]);
    return NVML_SUCCESS;
}
