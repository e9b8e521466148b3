/* Memory errors and what the driver did about them. */
#include "standin.h"

/* Memory banks that have spare rows, per GPU; each remapped row takes one from full availability. */
#define BANKS 640u

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t handle, nvmlEnableState_t *current,
                                  nvmlEnableState_t *pending) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetEccMode, handle, &d);
    REQUIRE(current != NULL && pending != NULL);
    struct standin_gauges gauges = standin_gauges(&d);
    REQUIRE_SUPPORT(gauges.ecc_enabled != STANDIN_ABSENT);
    *current = *pending = (nvmlEnableState_t)gauges.ecc_enabled;
    return NVML_SUCCESS;
}

static bool ecc_kind_exists(nvmlMemoryErrorType_t type, nvmlEccCounterType_t scope) {
    return (unsigned int)type < NVML_MEMORY_ERROR_TYPE_COUNT &&
           (unsigned int)scope < NVML_ECC_COUNTER_TYPE_COUNT;
}

nvmlReturn_t standin_ecc_total(const struct standin_gauges *gauges, nvmlMemoryErrorType_t type,
                               nvmlEccCounterType_t scope, unsigned long long *count) {
    REQUIRE(count != NULL && ecc_kind_exists(type, scope));
    REQUIRE_SUPPORT(gauges->ecc_enabled == NVML_FEATURE_ENABLED);
    *count = gauges->ecc_dram[type][scope] + gauges->ecc_sram[type][scope];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t handle, nvmlMemoryErrorType_t type,
                                         nvmlEccCounterType_t scope, unsigned long long *count) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetTotalEccErrors, handle, &d);
    struct standin_gauges gauges = standin_gauges(&d);
    return standin_ecc_total(&gauges, type, scope, count);
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t handle, nvmlMemoryErrorType_t type,
                                             nvmlEccCounterType_t scope,
                                             nvmlMemoryLocation_t location,
                                             unsigned long long *count) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetMemoryErrorCounter, handle, &d);
    REQUIRE(count != NULL && ecc_kind_exists(type, scope));
    REQUIRE((unsigned int)location < NVML_MEMORY_LOCATION_COUNT);
    struct standin_gauges gauges = standin_gauges(&d);
    REQUIRE_SUPPORT(gauges.ecc_enabled == NVML_FEATURE_ENABLED);
    /* From Ampere on only these two locations are told apart. */
    REQUIRE_SUPPORT(location == NVML_MEMORY_LOCATION_DRAM || location == NVML_MEMORY_LOCATION_SRAM);
    *count = location == NVML_MEMORY_LOCATION_DRAM ? gauges.ecc_dram[type][scope]
                                                   : gauges.ecc_sram[type][scope];
    return NVML_SUCCESS;
}

/* Row remapping exists from Ampere on, and not while MIG instances are active. */
static nvmlReturn_t remapping(const struct device *d, struct standin_gauges *gauges) {
    REQUIRE_SUPPORT(d->mig == NULL && d->gpu->architecture >= NVML_DEVICE_ARCH_AMPERE);
    REQUIRE_SUPPORT(!(d->gpu->mig_enabled == 1 && d->gpu->mig_count > 0));
    *gauges = standin_gauges(d);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t handle, unsigned int *corrected,
                                       unsigned int *uncorrected, unsigned int *pending,
                                       unsigned int *failure) {
    struct device d;
    struct standin_gauges gauges;
    ENTER_DEVICE(nvmlDeviceGetRemappedRows, handle, &d);
    REQUIRE(corrected != NULL && uncorrected != NULL && pending != NULL && failure != NULL);
    nvmlReturn_t result = remapping(&d, &gauges);
    if (result != NVML_SUCCESS)
        return result;
    *corrected = gauges.remapped_correctable;
    *uncorrected = gauges.remapped_uncorrectable;
    *pending = gauges.remap_pending;
    *failure = gauges.remap_failure;
    return NVML_SUCCESS;
}

#ifdef NVML_FI_DEV_REMAPPED_ROWS_COR_INACTIVE /* headers that have this field have the call as well */
nvmlReturn_t nvmlDeviceGetRemappedRows_v2(nvmlDevice_t handle, nvmlRemappedRowsInfo_v2_t *info) {
    struct device d;
    struct standin_gauges gauges;
    ENTER_DEVICE(nvmlDeviceGetRemappedRows_v2, handle, &d);
    REQUIRE(info != NULL);
    nvmlReturn_t result = remapping(&d, &gauges);
    if (result != NVML_SUCCESS)
        return result;
    *info = (nvmlRemappedRowsInfo_v2_t){
        .corrActiveRemaps = gauges.remapped_correctable,
        .uncActiveRemaps = gauges.remapped_uncorrectable,
        .bPending = gauges.remap_pending,
        .bFailureOccurred = gauges.remap_failure,
    };
    return NVML_SUCCESS;
}
#endif

nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t handle,
                                               nvmlRowRemapperHistogramValues_t *values) {
    struct device d;
    struct standin_gauges gauges;
    ENTER_DEVICE(nvmlDeviceGetRowRemapperHistogram, handle, &d);
    REQUIRE(values != NULL);
    nvmlReturn_t result = remapping(&d, &gauges);
    if (result != NVML_SUCCESS)
        return result;
    unsigned int remapped = gauges.remapped_correctable + gauges.remapped_uncorrectable;
    unsigned int touched = remapped < BANKS ? remapped : BANKS;
    *values = (nvmlRowRemapperHistogramValues_t){.max = BANKS - touched, .high = touched};
    return NVML_SUCCESS;
}
