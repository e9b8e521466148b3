/* Where a device sits: PCI, neighbours, NVLinks, the NVLink domain. */
#include <stdio.h>
#include <string.h>

#include "standin.h"

#define PCI_CLASS_DISPLAY 0x03u
#define PCI_SUBCLASS_3D 0x02u

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, nvmlPciInfo_t *pci) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetPciInfo_v3, handle, &d);
    REQUIRE(pci != NULL);
    const struct standin_gpu *gpu = d.gpu;
    memset(pci, 0, sizeof *pci);
    pci->domain = gpu->pci_domain;
    pci->bus = gpu->pci_bus;
    pci->device = gpu->pci_device;
    pci->pciDeviceId = gpu->pci_device_id;
    pci->pciSubSystemId = gpu->pci_subsystem_id;
    snprintf(pci->busId, sizeof pci->busId, NVML_DEVICE_PCI_BUS_ID_FMT, gpu->pci_domain,
             gpu->pci_bus, gpu->pci_device);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT,
             gpu->pci_domain & 0xFFFF, gpu->pci_bus & 0xFF, gpu->pci_device & 0x1F);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t handle, nvmlPciInfoExt_t *pci) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetPciInfoExt, handle, &d);
    REQUIRE(pci != NULL);
    REQUIRE_VERSION(pci->version, nvmlPciInfoExt_v1);
    pci->domain = d.gpu->pci_domain;
    pci->bus = d.gpu->pci_bus;
    pci->device = d.gpu->pci_device;
    pci->pciDeviceId = d.gpu->pci_device_id;
    pci->pciSubSystemId = d.gpu->pci_subsystem_id;
    pci->baseClass = PCI_CLASS_DISPLAY;
    pci->subClass = PCI_SUBCLASS_3D;
    snprintf(pci->busId, sizeof pci->busId, NVML_DEVICE_PCI_BUS_ID_FMT, d.gpu->pci_domain,
             d.gpu->pci_bus, d.gpu->pci_device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other,
                                                 nvmlGpuTopologyLevel_t *level) {
    struct device a, b;
    ENTER_DEVICE(nvmlDeviceGetTopologyCommonAncestor, one, &a);
    ENTER_DEVICE(nvmlDeviceGetTopologyCommonAncestor, other, &b);
    REQUIRE(level != NULL);
    if (a.slot == b.slot)
        *level = NVML_TOPOLOGY_INTERNAL;
    else
        *level = a.gpu->numa_node == b.gpu->numa_node ? NVML_TOPOLOGY_NODE : NVML_TOPOLOGY_SYSTEM;
    return NVML_SUCCESS;
}

/* One number that holds as long as the board does. */
#define STATIC_NUMBER(function, expression)                           \
    nvmlReturn_t function(nvmlDevice_t handle, unsigned int *value) { \
        struct device d;                                              \
        ENTER_DEVICE(function, handle, &d);                           \
        REQUIRE(value != NULL);                                       \
        *value = (expression);                                        \
        return NVML_SUCCESS;                                          \
    }

STATIC_NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, d.gpu->pcie_generation_max)
STATIC_NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, d.gpu->pcie_generation_max)
STATIC_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, d.gpu->pcie_width_max)
STATIC_NUMBER(nvmlDeviceGetBoardId, d.gpu->pci_domain << 16 | d.gpu->pci_bus << 8)
STATIC_NUMBER(nvmlDeviceGetMultiGpuBoard, 0)
STATIC_NUMBER(nvmlDeviceGetNumGpuCores, d.gpu->multiprocessors * 128)

static nvmlReturn_t link_of(const struct device *d, unsigned int link, struct standin_link *to) {
    REQUIRE_SUPPORT(d->gpu->links > 0 && d->mig == NULL);
    REQUIRE(link < d->gpu->links);
    uint64_t seq;
    do {
        seq = standin_read_begin(d->gpu);
        *to = d->gpu->link[link];
    } while (standin_read_retry(d->gpu, seq));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t handle, unsigned int link,
                                      nvmlEnableState_t *active) {
    struct device d;
    struct standin_link state;
    ENTER_DEVICE(nvmlDeviceGetNvLinkState, handle, &d);
    REQUIRE(active != NULL);
    nvmlReturn_t result = link_of(&d, link, &state);
    if (result == NVML_SUCCESS)
        *active = (nvmlEnableState_t)state.active;
    return result;
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t handle, unsigned int link,
                                        unsigned int *version) {
    struct device d;
    struct standin_link state;
    ENTER_DEVICE(nvmlDeviceGetNvLinkVersion, handle, &d);
    REQUIRE(version != NULL);
    nvmlReturn_t result = link_of(&d, link, &state);
    if (result == NVML_SUCCESS)
        *version = d.gpu->nvlink_version;
    return result;
}

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t handle, unsigned int link,
                                             nvmlNvLinkErrorCounter_t counter,
                                             unsigned long long *value) {
    struct device d;
    struct standin_link state;
    ENTER_DEVICE(nvmlDeviceGetNvLinkErrorCounter, handle, &d);
    REQUIRE(value != NULL && (unsigned int)counter < NVML_NVLINK_ERROR_COUNT);
    nvmlReturn_t result = link_of(&d, link, &state);
    if (result != NVML_SUCCESS)
        return result;
    switch (counter) {
    case NVML_NVLINK_ERROR_DL_REPLAY:
        *value = state.replays;
        return NVML_SUCCESS;
    case NVML_NVLINK_ERROR_DL_RECOVERY:
        *value = state.recoveries;
        return NVML_SUCCESS;
    case NVML_NVLINK_ERROR_DL_CRC_FLIT:
        *value = state.crc_errors;
        return NVML_SUCCESS;
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

/* Boards of this kind connect through switches. */
nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t handle, unsigned int link,
                                                 nvmlIntNvLinkDeviceType_t *type) {
    struct device d;
    struct standin_link state;
    ENTER_DEVICE(nvmlDeviceGetNvLinkRemoteDeviceType, handle, &d);
    REQUIRE(type != NULL);
    nvmlReturn_t result = link_of(&d, link, &state);
    if (result == NVML_SUCCESS)
        *type = NVML_NVLINK_DEVICE_TYPE_SWITCH;
    return result;
}

/* Six switches, three links to each. */
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t handle, unsigned int link,
                                                 nvmlPciInfo_t *pci) {
    struct device d;
    struct standin_link state;
    ENTER_DEVICE(nvmlDeviceGetNvLinkRemotePciInfo_v2, handle, &d);
    REQUIRE(pci != NULL);
    nvmlReturn_t result = link_of(&d, link, &state);
    if (result != NVML_SUCCESS)
        return result;
    REQUIRE_SUPPORT(state.active);
    memset(pci, 0, sizeof *pci);
    pci->bus = 5 + link / 3;
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", pci->bus);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetC2cModeInfoV(nvmlDevice_t handle, nvmlC2cModeInfo_v1_t *info) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetC2cModeInfoV, handle, &d);
    REQUIRE(info != NULL);
    info->isC2cEnabled = d.gpu->c2c;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t handle, nvmlGpuFabricInfoV_t *info) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetGpuFabricInfoV, handle, &d);
    REQUIRE(info != NULL);
    bool summary = false;
#ifdef nvmlGpuFabricInfo_v3
    summary = info->version == nvmlGpuFabricInfo_v3;
#endif
    if (!summary)
        REQUIRE_VERSION(info->version, nvmlGpuFabricInfo_v2);
    REQUIRE_SUPPORT(d.gpu->fabric_state != STANDIN_ABSENT && d.mig == NULL);
    memcpy(info->clusterUuid, d.gpu->fabric_cluster, sizeof info->clusterUuid);
    info->status = NVML_SUCCESS;
    info->cliqueId = d.gpu->fabric_clique;
    info->state = (nvmlGpuFabricState_t)d.gpu->fabric_state;
    info->healthMask = d.gpu->fabric_health_mask;
#ifdef nvmlGpuFabricInfo_v3
    if (summary) /* a version 2 structure ends before it */
        info->healthSummary = (unsigned char)d.gpu->fabric_health_summary;
#endif
    return NVML_SUCCESS;
}

#ifdef NVML_GPU_FABRIC_CLIQUE_MAX
nvmlReturn_t nvmlDeviceGetGpuFabricInfo_v4(nvmlDevice_t handle, nvmlGpuFabricInfo_v4_t *info) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetGpuFabricInfo_v4, handle, &d);
    REQUIRE(info != NULL);
    REQUIRE_SUPPORT(d.gpu->fabric_state != STANDIN_ABSENT && d.mig == NULL);
    memset(info, 0, sizeof *info);
    memcpy(info->clusterUuid, d.gpu->fabric_cluster, sizeof info->clusterUuid);
    info->cliques[0].type = NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER;
    info->cliques[0].id = d.gpu->fabric_clique;
    info->numCliques = 1;
    info->state = (nvmlGpuFabricState_t)d.gpu->fabric_state;
    info->healthMask = d.gpu->fabric_health_mask;
    info->healthSummary = (unsigned char)d.gpu->fabric_health_summary;
    return NVML_SUCCESS;
}
#endif
