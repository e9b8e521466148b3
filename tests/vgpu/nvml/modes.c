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

/* Driver models are Windows'; the library has the calls on Linux too. */
nvmlReturn_t nvmlDeviceGetDriverModel(nvmlDevice_t handle, nvmlDriverModel_t *current,
                                      nvmlDriverModel_t *pending) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetDriverModel, handle, &d);
    REQUIRE(current != NULL || pending != NULL);
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetDriverModel_v2(nvmlDevice_t handle, nvmlDriverModel_t *current,
                                         nvmlDriverModel_t *pending) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetDriverModel_v2, handle, &d);
    REQUIRE(current != NULL || pending != NULL);
    return NVML_ERROR_NOT_SUPPORTED;
}
