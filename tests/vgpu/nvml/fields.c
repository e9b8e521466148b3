/* Field values: many quantities in one call, each with its own return code, type and time. */
#include <string.h>

#include "standin.h"

#define ALL_LINKS 0xFFFFFFFFu
#define SCOPE_GPU 0u
#define SCOPE_MODULE 1u
#define BYTES_PER_KIB 1024

/* Fields by number where older headers lack the name. */
enum {
    FIELD_NVLINK5_XMIT_BYTES = 202,
    FIELD_NVLINK5_RCV_BYTES = 204,
    FIELD_NVLINK5_RX_ERRORS = 208,
    FIELD_NVLINK5_RECOVERIES_FAILED = 214,
    FIELD_NVLINK5_RECOVERY_EVENTS = 215,
    FIELD_NVLINK5_EFFECTIVE_ERRORS = 219,
    FIELD_NVLINK5_SYMBOL_ERRORS = 221,
    FIELD_RECOVERY_ACTION = 230,
    FIELD_SW_THERM_SLOWDOWN = 269,
    FIELD_HW_THERM_SLOWDOWN = 270,
    FIELD_HW_POWER_BRAKE = 271,
    FIELD_GPU_TEMP = 308,
};

static nvmlReturn_t put_unsigned(nvmlFieldValue_t *field, uint32_t value) {
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    field->value.uiVal = value;
    return NVML_SUCCESS;
}

/* A gauge, which may be absent; a wrapping counter may hold the same number and mean it. */
static nvmlReturn_t put_gauge(nvmlFieldValue_t *field, uint32_t value) {
    REQUIRE_SUPPORT(value != STANDIN_ABSENT);
    return put_unsigned(field, value);
}

static nvmlReturn_t put_long(nvmlFieldValue_t *field, uint64_t value) {
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    field->value.ullVal = value;
    return NVML_SUCCESS;
}

static nvmlReturn_t put_double(nvmlFieldValue_t *field, double value) {
    field->valueType = NVML_VALUE_TYPE_DOUBLE;
    field->value.dVal = value;
    return NVML_SUCCESS;
}

/* Cumulative fields: ns of throttling, mJ. */
static const struct {
    unsigned int field;
    unsigned int counter;
} cumulative[] = {
    {NVML_FI_DEV_PERF_POLICY_POWER, STANDIN_THROTTLE_POWER},
    {NVML_FI_DEV_PERF_POLICY_THERMAL, STANDIN_THROTTLE_THERMAL},
    {NVML_FI_DEV_PERF_POLICY_SYNC_BOOST, STANDIN_THROTTLE_SYNC_BOOST},
    {NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT, STANDIN_THROTTLE_BOARD_LIMIT},
    {NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION, STANDIN_THROTTLE_LOW_UTILIZATION},
    {NVML_FI_DEV_PERF_POLICY_RELIABILITY, STANDIN_THROTTLE_RELIABILITY},
    {NVML_FI_DEV_PERF_POLICY_TOTAL_APP_CLOCKS, STANDIN_THROTTLE_APP_CLOCKS},
    {NVML_FI_DEV_PERF_POLICY_TOTAL_BASE_CLOCKS, STANDIN_THROTTLE_BASE_CLOCKS},
    {FIELD_SW_THERM_SLOWDOWN, STANDIN_THROTTLE_SW_THERMAL},
    {FIELD_HW_THERM_SLOWDOWN, STANDIN_THROTTLE_HW_THERMAL},
    {FIELD_HW_POWER_BRAKE, STANDIN_THROTTLE_HW_POWER_BRAKE},
    {NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, STANDIN_ENERGY_MJ},
};

/* Unsigned gauges by their place. */
static const struct {
    unsigned int field;
    size_t offset;
} unsigned_gauges[] = {
    {NVML_FI_DEV_ECC_CURRENT, offsetof(struct standin_gauges, ecc_enabled)},
    {NVML_FI_DEV_ECC_PENDING, offsetof(struct standin_gauges, ecc_enabled)},
    {NVML_FI_DEV_PCIE_REPLAY_COUNTER, offsetof(struct standin_gauges, pcie_replays)},
    {NVML_FI_DEV_REMAPPED_COR, offsetof(struct standin_gauges, remapped_correctable)},
    {NVML_FI_DEV_REMAPPED_UNC, offsetof(struct standin_gauges, remapped_uncorrectable)},
    {NVML_FI_DEV_REMAPPED_PENDING, offsetof(struct standin_gauges, remap_pending)},
    {NVML_FI_DEV_REMAPPED_FAILURE, offsetof(struct standin_gauges, remap_failure)},
    {FIELD_RECOVERY_ACTION, offsetof(struct standin_gauges, recovery_action)},
};

static nvmlReturn_t link_traffic(const struct device *d, nvmlFieldValue_t *field, bool transmit,
                                 int64_t unit, uint64_t now_ns) {
    uint32_t links = d->gpu->links;
    unsigned int counter = transmit ? STANDIN_NVLINK_TX : STANDIN_NVLINK_RX;
    int64_t bytes = 0;
    REQUIRE_SUPPORT(links > 0);
    REQUIRE(field->scopeId == ALL_LINKS || field->scopeId < links);
    for (uint32_t link = 0; link < links; link++) {
        if (field->scopeId == ALL_LINKS || field->scopeId == link)
            bytes += standin_counter(d, counter + link, now_ns);
    }
    return put_long(field, (uint64_t)(bytes / unit));
}

/* State and errors of one link. Blackwell counts recoveries under new ids and dropped the old ones. */
static nvmlReturn_t link_field(const struct device *d, nvmlFieldValue_t *field) {
    bool blackwell = d->gpu->architecture >= 10;
    REQUIRE_SUPPORT(d->gpu->links > 0);
    REQUIRE(field->scopeId < d->gpu->links);
    const struct standin_link *link = &d->gpu->link[field->scopeId];
    switch (field->fieldId) {
    case NVML_FI_DEV_NVLINK_GET_SPEED:
        return put_unsigned(field, link->active ? d->gpu->link_speed_mbps : 0);
    case NVML_FI_DEV_NVLINK_GET_STATE:
        return put_unsigned(field, link->active);
    case NVML_FI_DEV_NVLINK_GET_VERSION:
        return put_unsigned(field, d->gpu->nvlink_version);
    case NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY:
        REQUIRE_SUPPORT(!blackwell);
        return put_long(field, link->replays);
    case NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY:
        REQUIRE_SUPPORT(!blackwell);
        return put_long(field, link->recoveries);
    case NVML_FI_DEV_NVLINK_ERROR_DL_CRC:
        REQUIRE_SUPPORT(!blackwell);
        return put_long(field, link->crc_errors);
    case FIELD_NVLINK5_RECOVERY_EVENTS:
        REQUIRE_SUPPORT(blackwell);
        return put_long(field, link->recoveries);
    case FIELD_NVLINK5_RX_ERRORS:
        REQUIRE_SUPPORT(blackwell);
        return put_long(field, link->rx_errors);
    case FIELD_NVLINK5_RECOVERIES_FAILED:
        REQUIRE_SUPPORT(blackwell);
        return put_long(field, link->recoveries_failed);
    case FIELD_NVLINK5_EFFECTIVE_ERRORS:
        REQUIRE_SUPPORT(blackwell);
        return put_long(field, link->effective_errors);
    case FIELD_NVLINK5_SYMBOL_ERRORS:
        REQUIRE_SUPPORT(blackwell);
        return put_long(field, link->symbol_errors);
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

static nvmlReturn_t traffic_field(const struct device *d, nvmlFieldValue_t *field, uint64_t now_ns) {
    switch (field->fieldId) {
    case NVML_FI_DEV_NVLINK_LINK_COUNT:
        return put_unsigned(field, d->gpu->links);
    case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: /* cumulative KiB, despite the name */
        return link_traffic(d, field, true, BYTES_PER_KIB, now_ns);
    case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX:
        return link_traffic(d, field, false, BYTES_PER_KIB, now_ns);
    case FIELD_NVLINK5_XMIT_BYTES:
        REQUIRE_SUPPORT(d->gpu->architecture >= 10);
        return link_traffic(d, field, true, 1, now_ns);
    case FIELD_NVLINK5_RCV_BYTES:
        REQUIRE_SUPPORT(d->gpu->architecture >= 10);
        return link_traffic(d, field, false, 1, now_ns);
    case NVML_FI_DEV_PCIE_COUNT_TX_BYTES: /* 32 bits in the kernel's interface: it wraps */
        return put_unsigned(field, (uint32_t)standin_counter(d, STANDIN_PCIE_TX, now_ns));
    case NVML_FI_DEV_PCIE_COUNT_RX_BYTES:
        return put_unsigned(field, (uint32_t)standin_counter(d, STANDIN_PCIE_RX, now_ns));
    default:
        return link_field(d, field);
    }
}

static nvmlReturn_t power_field(const struct device *d, nvmlFieldValue_t *field,
                                const struct standin_gauges *gauges, uint64_t now_ns) {
    REQUIRE(field->scopeId == SCOPE_GPU || field->scopeId == SCOPE_MODULE);
    REQUIRE_SUPPORT(field->scopeId == SCOPE_GPU); /* modules with a CPU only */
    switch (field->fieldId) {
    case NVML_FI_DEV_POWER_AVERAGE:
        REQUIRE_SUPPORT(gauges->power_mw != STANDIN_ABSENT);
        return put_unsigned(field, standin_average_power_mw(d));
    case NVML_FI_DEV_POWER_INSTANT:
        return put_gauge(field, gauges->power_mw);
    case NVML_FI_DEV_POWER_MIN_LIMIT:
        return put_gauge(field, gauges->power_limit_min_mw);
    case NVML_FI_DEV_POWER_MAX_LIMIT:
        return put_gauge(field, gauges->power_limit_max_mw);
    case NVML_FI_DEV_POWER_DEFAULT_LIMIT:
        return put_gauge(field, gauges->power_limit_default_mw);
    case NVML_FI_DEV_POWER_CURRENT_LIMIT:
    case NVML_FI_DEV_POWER_REQUESTED_LIMIT:
        return put_gauge(field, gauges->power_limit_mw);
    default: /* NVML_FI_DEV_ENERGY */
        return put_long(field, (uint64_t)standin_counter(d, STANDIN_ENERGY_MJ, now_ns));
    }
}

static nvmlReturn_t ecc_field(nvmlFieldValue_t *field, const struct standin_gauges *gauges) {
    unsigned int kind = field->fieldId - NVML_FI_DEV_ECC_SBE_VOL_TOTAL; /* SBE, DBE, then aggregate */
    unsigned long long count = 0;
    nvmlReturn_t result = standin_ecc_total(gauges, (nvmlMemoryErrorType_t)(kind % 2),
                                            (nvmlEccCounterType_t)(kind / 2), &count);
    return result == NVML_SUCCESS ? put_long(field, count) : result;
}

static nvmlReturn_t fetch(const struct device *d, nvmlFieldValue_t *field,
                          const struct standin_gauges *gauges, uint64_t now_ns) {
    unsigned int id = field->fieldId;
    REQUIRE(id > 0 && id < STANDIN_METRICS);
    REQUIRE_SUPPORT((d->gpu->field_unsupported[id / 8] >> (id % 8) & 1) == 0 && d->mig == NULL);
    for (size_t i = 0; i < sizeof cumulative / sizeof *cumulative; i++) {
        if (cumulative[i].field == id)
            return put_long(field, (uint64_t)standin_counter(d, cumulative[i].counter, now_ns));
    }
    for (size_t i = 0; i < sizeof unsigned_gauges / sizeof *unsigned_gauges; i++) {
        if (unsigned_gauges[i].field == id) {
            uint32_t value;
            memcpy(&value, (const char *)gauges + unsigned_gauges[i].offset, sizeof value);
            return put_gauge(field, value);
        }
    }
    if (id >= NVML_FI_DEV_ECC_SBE_VOL_TOTAL && id <= NVML_FI_DEV_ECC_DBE_AGG_TOTAL)
        return ecc_field(field, gauges);
    if (id >= NVML_FI_DEV_POWER_AVERAGE && id <= NVML_FI_DEV_POWER_REQUESTED_LIMIT)
        return power_field(d, field, gauges, now_ns);
    if (id == NVML_FI_DEV_MEMORY_TEMP)
        return put_unsigned(field, (uint32_t)gauges->memory_temperature_celsius);
    if (id == FIELD_GPU_TEMP)
        return put_double(field, gauges->temperature_celsius);
    return traffic_field(d, field, now_ns);
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t handle, int count, nvmlFieldValue_t *fields) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetFieldValues, handle, &d);
    REQUIRE(fields != NULL && count > 0);
    uint64_t now_ns = standin_now_ns();
    struct standin_gauges gauges = standin_gauges(&d);
    for (int i = 0; i < count; i++) {
        fields[i].timestamp = (long long)standin_timestamp_us(now_ns);
        fields[i].nvmlReturn = fetch(&d, &fields[i], &gauges, now_ns);
    }
    long long latency_us = (long long)((standin_now_ns() - now_ns) / 1000);
    for (int i = 0; i < count; i++)
        fields[i].latencyUsec = latency_us;
    return NVML_SUCCESS;
}
