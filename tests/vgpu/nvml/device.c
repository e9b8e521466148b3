/* Finding devices and their identity: what does not change while the driver runs. */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "standin.h"

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    ENTER(nvmlSystemGetDriverVersion);
    return standin_copy_string(standin_state()->driver_version, version, length);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    ENTER(nvmlSystemGetNVMLVersion);
    return standin_copy_string(standin_state()->nvml_version, version, length);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    ENTER(nvmlSystemGetCudaDriverVersion);
    REQUIRE(version != NULL);
    *version = (int)standin_state()->cuda_version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER(nvmlSystemGetCudaDriverVersion_v2);
    REQUIRE(version != NULL);
    *version = (int)standin_state()->cuda_version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    ENTER(nvmlDeviceGetCount_v2);
    REQUIRE(count != NULL);
    *count = standin_device_count();
    return NVML_SUCCESS;
}

/* Hands out the handle of a slot that was found, or the reason why there is none. */
static nvmlReturn_t found(enum function_id fn, uint32_t slot, nvmlReturn_t missing, nvmlDevice_t *to) {
    nvmlReturn_t result = standin_enter_slot(fn, slot);
    if (result != NVML_SUCCESS)
        return result;
    REQUIRE(to != NULL);
    if (slot == STANDIN_ANY_GPU)
        return missing;
    uint32_t lost = __atomic_load_n(&standin_state()->gpus[slot].lost, __ATOMIC_ACQUIRE);
    /* A GPU that needs a reset still has a handle. */
    if (lost != NVML_SUCCESS && lost != NVML_ERROR_RESET_REQUIRED)
        return (nvmlReturn_t)lost;
    *to = standin_handle(slot);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    uint32_t slot;
    if (!standin_slot_of_index(index, &slot))
        slot = STANDIN_ANY_GPU;
    return found(FN_nvmlDeviceGetHandleByIndex_v2, slot, NVML_ERROR_INVALID_ARGUMENT, device);
}

typedef bool (*predicate)(const struct standin_gpu *gpu, const char *text);

static uint32_t search(predicate matches, const char *text) {
    uint32_t slot;
    for (uint32_t index = 0; standin_slot_of_index(index, &slot); index++) {
        if (matches(&standin_state()->gpus[slot], text))
            return slot;
    }
    return STANDIN_ANY_GPU;
}

static bool has_uuid(const struct standin_gpu *gpu, const char *text) {
    return strcmp(gpu->uuid, text) == 0;
}

static bool has_serial(const struct standin_gpu *gpu, const char *text) {
    return gpu->serial[0] != '\0' && strcmp(gpu->serial, text) == 0;
}

/* NVML takes "domain:bus:device.function" with or without leading zeros and function. */
static bool has_bus_id(const struct standin_gpu *gpu, const char *text) {
    unsigned int domain = 0, bus = 0, device = 0;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &device) != 3) {
        domain = 0;
        if (sscanf(text, "%x:%x", &bus, &device) != 2)
            return false;
    }
    return domain == gpu->pci_domain && bus == gpu->pci_bus && device == gpu->pci_device;
}

static nvmlReturn_t mig_by_uuid(const char *uuid, nvmlDevice_t *device) {
    uint32_t slot;
    for (uint32_t index = 0; standin_slot_of_index(index, &slot); index++) {
        const struct standin_gpu *gpu = &standin_state()->gpus[slot];
        for (uint32_t mig = 0; mig < gpu->mig_count && mig < STANDIN_MIGS; mig++) {
            if (strcmp(gpu->migs[mig].uuid, uuid) == 0) {
                *device = standin_mig_handle(slot, mig);
                return NVML_SUCCESS;
            }
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    uint32_t slot = uuid == NULL ? STANDIN_ANY_GPU : search(has_uuid, uuid);
    nvmlReturn_t missing = uuid == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_FOUND;
    nvmlReturn_t result = found(FN_nvmlDeviceGetHandleByUUID, slot, missing, device);
    if (result == NVML_ERROR_NOT_FOUND && strncmp(uuid, "MIG-", 4) == 0)
        return mig_by_uuid(uuid, device);
    return result;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    uint32_t slot = bus_id == NULL ? STANDIN_ANY_GPU : search(has_bus_id, bus_id);
    nvmlReturn_t missing = bus_id == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_FOUND;
    return found(FN_nvmlDeviceGetHandleByPciBusId_v2, slot, missing, device);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    uint32_t slot = serial == NULL ? STANDIN_ANY_GPU : search(has_serial, serial);
    nvmlReturn_t missing = serial == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_FOUND;
    return found(FN_nvmlDeviceGetHandleBySerial, slot, missing, device);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t handle, char *name, unsigned int length) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetName, handle, &d);
    if (d.mig == NULL)
        return standin_copy_string(d.gpu->name, name, length);
    char text[128];
    snprintf(text, sizeof text, "%.95s MIG %ug.%lugb", d.gpu->name, d.mig->slices,
             (unsigned long)(d.mig->memory_total_bytes >> 30));
    return standin_copy_string(text, name, length);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *uuid, unsigned int length) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetUUID, handle, &d);
    return standin_copy_string(d.mig == NULL ? d.gpu->uuid : d.mig->uuid, uuid, length);
}

/* A text that a board may lack. */
static nvmlReturn_t copy_if_known(const char *text, char *to, unsigned int length) {
    REQUIRE_SUPPORT(text[0] != '\0');
    return standin_copy_string(text, to, length);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t handle, char *serial, unsigned int length) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetSerial, handle, &d);
    return copy_if_known(d.gpu->serial, serial, length);
}

nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t handle, char *number, unsigned int length) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetBoardPartNumber, handle, &d);
    return copy_if_known(d.gpu->part_number, number, length);
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t handle, char *version, unsigned int length) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetVbiosVersion, handle, &d);
    return copy_if_known(d.gpu->vbios, version, length);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t handle, unsigned int *index) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetIndex, handle, &d);
    REQUIRE(index != NULL);
    if (d.mig != NULL) {
        *index = d.mig_index;
        return NVML_SUCCESS;
    }
    return standin_index_of_slot(d.slot, index) ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

/* A number that a device may lack. */
static nvmlReturn_t number_if_known(uint32_t number, unsigned int *to) {
    REQUIRE(to != NULL);
    REQUIRE_SUPPORT(number != STANDIN_ABSENT);
    *to = number;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t handle, unsigned int *minor) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetMinorNumber, handle, &d);
    return number_if_known(d.gpu->minor, minor);
}

nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t handle, unsigned int *node) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetNumaNodeId, handle, &d);
    return number_if_known(d.gpu->numa_node, node);
}

nvmlReturn_t nvmlDeviceGetModuleId(nvmlDevice_t handle, unsigned int *module_id) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetModuleId, handle, &d);
    return number_if_known(d.gpu->module_id, module_id);
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t handle, nvmlBrandType_t *brand) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetBrand, handle, &d);
    REQUIRE(brand != NULL);
    *brand = (nvmlBrandType_t)d.gpu->brand;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t handle, nvmlDeviceArchitecture_t *arch) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetArchitecture, handle, &d);
    REQUIRE(arch != NULL);
    *arch = d.gpu->architecture;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t handle, int *major, int *minor) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetCudaComputeCapability, handle, &d);
    REQUIRE(major != NULL && minor != NULL);
    *major = (int)d.gpu->cc_major;
    *minor = (int)d.gpu->cc_minor;
    return NVML_SUCCESS;
}
