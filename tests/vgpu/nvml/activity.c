/* Utilization as the driver samples it: over whole sample periods, and the rings of the last ones. */
#include <math.h>

#include "standin.h"

/* Ring depth of driver 595; older ones kept 100. */
#define RING_DEPTH 72u

static uint64_t current_slot(void) {
    return standin_now_ns() / standin_state()->sample_period_ns;
}

/* Percent of the sample period that ended at the slot. */
static unsigned int percent_of_slot(const struct device *d, unsigned int sampled, uint64_t slot) {
    double active_ns = (double)(standin_sampled_at(d, sampled, slot) -
                                standin_sampled_at(d, sampled, slot - 1));
    double period_ns = (double)standin_state()->sample_period_ns;
    return (unsigned int)llround(fmin(fmax(active_ns / period_ns, 0.0), 1.0) * 100.0);
}

static bool partitioned(const struct device *d) {
    return d->mig != NULL || d->gpu->mig_enabled == 1;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, nvmlUtilization_t *utilization) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetUtilizationRates, handle, &d);
    REQUIRE(utilization != NULL);
    REQUIRE_SUPPORT(!partitioned(&d));
    uint64_t slot = current_slot();
    utilization->gpu = percent_of_slot(&d, STANDIN_SAMPLED_GR, slot);
    utilization->memory = percent_of_slot(&d, STANDIN_SAMPLED_MEM, slot);
    return NVML_SUCCESS;
}

/* Engines report the period they were sampled over as well. */
#define ENGINE(function, sampled)                                                                  \
    nvmlReturn_t function(nvmlDevice_t handle, unsigned int *percent, unsigned int *period_us) {   \
        struct device d;                                                                           \
        ENTER_DEVICE(function, handle, &d);                                                        \
        REQUIRE(percent != NULL && period_us != NULL);                                             \
        REQUIRE_SUPPORT(!partitioned(&d));                                                         \
        *percent = percent_of_slot(&d, (sampled), current_slot());                                 \
        *period_us = (unsigned int)(standin_state()->sample_period_ns / 1000);                     \
        return NVML_SUCCESS;                                                                       \
    }

ENGINE(nvmlDeviceGetEncoderUtilization, STANDIN_SAMPLED_ENC)
ENGINE(nvmlDeviceGetDecoderUtilization, STANDIN_SAMPLED_DEC)
ENGINE(nvmlDeviceGetJpgUtilization, STANDIN_SAMPLED_JPG)
ENGINE(nvmlDeviceGetOfaUtilization, STANDIN_SAMPLED_OFA)

static int sampled_of_type(nvmlSamplingType_t type) {
    switch (type) {
    case NVML_TOTAL_POWER_SAMPLES:
        return STANDIN_SAMPLED_ENERGY;
    case NVML_GPU_UTILIZATION_SAMPLES:
        return STANDIN_SAMPLED_GR;
    case NVML_MEMORY_UTILIZATION_SAMPLES:
        return STANDIN_SAMPLED_MEM;
    case NVML_ENC_UTILIZATION_SAMPLES:
        return STANDIN_SAMPLED_ENC;
    case NVML_DEC_UTILIZATION_SAMPLES:
        return STANDIN_SAMPLED_DEC;
    case NVML_JPG_UTILIZATION_SAMPLES:
        return STANDIN_SAMPLED_JPG;
    case NVML_OFA_UTILIZATION_SAMPLES:
        return STANDIN_SAMPLED_OFA;
    default:
        return -1;
    }
}

static unsigned int sample_value(const struct device *d, unsigned int sampled, uint64_t slot) {
    if (sampled != STANDIN_SAMPLED_ENERGY)
        return percent_of_slot(d, sampled, slot);
    int64_t energy_mj =
        standin_sampled_at(d, sampled, slot) - standin_sampled_at(d, sampled, slot - 1);
    return (unsigned int)llround((double)energy_mj * 1e9 / (double)standin_state()->sample_period_ns);
}

/* The oldest slot of the ring whose end is later than the caller has seen. */
static uint64_t first_unseen(uint64_t slot, uint64_t seen_us) {
    uint64_t period = standin_state()->sample_period_ns;
    uint64_t first = slot - RING_DEPTH + 1;
    while (first <= slot && standin_timestamp_us(first * period) <= seen_us)
        first++;
    return first;
}

nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t handle, nvmlSamplingType_t type,
                                  unsigned long long seen_us, nvmlValueType_t *value_type,
                                  unsigned int *count, nvmlSample_t *samples) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetSamples, handle, &d);
    REQUIRE(value_type != NULL && count != NULL && !(samples != NULL && *count == 0));
    int sampled = sampled_of_type(type);
    REQUIRE_SUPPORT(sampled >= 0);
    REQUIRE_SUPPORT(!(partitioned(&d) && type != NVML_TOTAL_POWER_SAMPLES));
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (samples == NULL) { /* the size that is always enough */
        *count = RING_DEPTH;
        return NVML_SUCCESS;
    }
    uint64_t slot = current_slot();
    uint64_t first = first_unseen(slot, seen_us);
    if (first > slot)
        return NVML_ERROR_NOT_FOUND;
    if (slot - first + 1 > *count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    unsigned int written = 0;
    for (uint64_t s = first; s <= slot; s++, written++) {
        samples[written].timeStamp = standin_timestamp_us(s * standin_state()->sample_period_ns);
        samples[written].sampleValue.uiVal = sample_value(&d, (unsigned int)sampled, s);
    }
    *count = written;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t handle, nvmlPcieUtilCounter_t direction,
                                         unsigned int *kilobytes_per_s) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetPcieThroughput, handle, &d);
    REQUIRE(kilobytes_per_s != NULL && (unsigned int)direction < NVML_PCIE_UTIL_COUNT);
    REQUIRE_SUPPORT(d.mig == NULL);
    unsigned int id = direction == NVML_PCIE_UTIL_TX_BYTES ? STANDIN_PCIE_TX : STANDIN_PCIE_RX;
    /* The call itself measures, over 20 ms. */
    uint64_t begin = standin_now_ns();
    int64_t before = standin_counter(&d, id, begin);
    standin_sleep_ns(20 * NS_PER_MS);
    uint64_t end = standin_now_ns();
    double bytes = (double)(standin_counter(&d, id, end) - before);
    *kilobytes_per_s = (unsigned int)(bytes * 1e9 / (double)(end - begin) / 1000.0);
    return NVML_SUCCESS;
}
