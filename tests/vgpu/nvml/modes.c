/* Settings of a device that nobody changes here. */
#include "standin.h"

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t handle, nvmlEnableState_t *mode) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetPersistenceMode, handle, &d);
    REQUIRE(mode != NULL);
    *mode = (nvmlEnableState_t)standin_gauges(&d).persistence;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t handle, nvmlEnableState_t *mode) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetDisplayMode, handle, &d);
    REQUIRE(mode != NULL);
    *mode = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t handle, nvmlEnableState_t *active) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetDisplayActive, handle, &d);
    REQUIRE(active != NULL);
    *active = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t handle, nvmlComputeMode_t *mode) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetComputeMode, handle, &d);
    REQUIRE(mode != NULL);
    *mode = NVML_COMPUTEMODE_DEFAULT;
    return NVML_SUCCESS;
}
