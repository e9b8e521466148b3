/* MIG: devices that share a GPU. Their handles are invalid after each new layout. */
#include <string.h>

#include "standin.h"

#define MIG_DEVICES_MAX 7u

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned int *current,
                                  unsigned int *pending) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetMigMode, handle, &d);
    REQUIRE(current != NULL && pending != NULL);
    REQUIRE_SUPPORT(d.mig == NULL && d.gpu->mig_enabled != STANDIN_ABSENT);
    *current = *pending = d.gpu->mig_enabled;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned int *count) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetMaxMigDeviceCount, handle, &d);
    REQUIRE(count != NULL && d.mig == NULL);
    *count = d.gpu->mig_enabled == 1 ? MIG_DEVICES_MAX : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned int index,
                                                 nvmlDevice_t *mig) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetMigDeviceHandleByIndex, handle, &d);
    REQUIRE(mig != NULL && d.mig == NULL);
    REQUIRE_SUPPORT(d.gpu->mig_enabled == 1);
    REQUIRE(index < MIG_DEVICES_MAX);
    if (index >= d.gpu->mig_count)
        return NVML_ERROR_NOT_FOUND;
    *mig = standin_mig_handle(d.slot, index);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t handle, nvmlDevice_t *parent) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle, &d);
    REQUIRE(parent != NULL && d.mig != NULL);
    *parent = standin_handle(d.slot);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t handle, unsigned int *is_mig) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceIsMigDeviceHandle, handle, &d);
    REQUIRE(is_mig != NULL);
    *is_mig = d.mig != NULL;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t handle, unsigned int *id) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetGpuInstanceId, handle, &d);
    REQUIRE(id != NULL && d.mig != NULL);
    *id = d.mig->gpu_instance;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t handle, unsigned int *id) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetComputeInstanceId, handle, &d);
    REQUIRE(id != NULL && d.mig != NULL);
    *id = d.mig->compute_instance;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t handle, nvmlDeviceAttributes_t *attributes) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetAttributes_v2, handle, &d);
    REQUIRE(attributes != NULL);
    REQUIRE_SUPPORT(d.mig != NULL);
    memset(attributes, 0, sizeof *attributes);
    attributes->multiprocessorCount = d.mig->multiprocessors;
    attributes->gpuInstanceSliceCount = d.mig->slices;
    attributes->computeInstanceSliceCount = d.mig->slices;
    attributes->memorySizeMB = d.mig->memory_total_bytes >> 20;
    return NVML_SUCCESS;
}
