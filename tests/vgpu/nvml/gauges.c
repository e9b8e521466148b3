/* Memory, power, clocks, temperature: values of a moment. */
#include <math.h>

#include "standin.h"

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *memory) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetMemoryInfo, handle, &d);
    REQUIRE(memory != NULL);
    uint64_t reserved = d.mig == NULL ? d.gpu->memory_reserved_bytes : 0;
    memory->total = d.mig == NULL ? d.gpu->memory_total_bytes : d.mig->memory_total_bytes;
    REQUIRE_SUPPORT(memory->total != STANDIN_FOREVER);
    /* The first version of the call counts what the driver reserves as used. */
    memory->used = (d.mig == NULL ? d.gpu->memory_used_bytes : d.mig->memory_used_bytes) + reserved;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *memory) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetMemoryInfo_v2, handle, &d);
    REQUIRE(memory != NULL);
    REQUIRE_VERSION(memory->version, nvmlMemory_v2);
    memory->total = d.mig == NULL ? d.gpu->memory_total_bytes : d.mig->memory_total_bytes;
    REQUIRE_SUPPORT(memory->total != STANDIN_FOREVER);
    memory->reserved = d.mig == NULL ? d.gpu->memory_reserved_bytes : 0;
    memory->used = d.mig == NULL ? d.gpu->memory_used_bytes : d.mig->memory_used_bytes;
    memory->free = memory->total - memory->reserved - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t handle, nvmlBAR1Memory_t *memory) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetBAR1MemoryInfo, handle, &d);
    REQUIRE(memory != NULL);
    REQUIRE_SUPPORT(d.gpu->bar1_total_bytes != STANDIN_FOREVER);
    memory->bar1Total = d.gpu->bar1_total_bytes;
    memory->bar1Used = d.gpu->bar1_used_bytes;
    memory->bar1Free = memory->bar1Total - memory->bar1Used;
    return NVML_SUCCESS;
}

/* One unsigned gauge; STANDIN_ABSENT is "not supported". */
#define GAUGE(function, field)                                            \
    nvmlReturn_t function(nvmlDevice_t handle, unsigned int *value) {     \
        struct device d;                                                  \
        ENTER_DEVICE(function, handle, &d);                               \
        REQUIRE(value != NULL);                                           \
        struct standin_gauges gauges = standin_gauges(&d);                \
        REQUIRE_SUPPORT(d.mig == NULL && gauges.field != STANDIN_ABSENT); \
        *value = gauges.field;                                            \
        return NVML_SUCCESS;                                              \
    }

GAUGE(nvmlDeviceGetPowerManagementLimit, power_limit_mw)
GAUGE(nvmlDeviceGetEnforcedPowerLimit, power_limit_mw)
GAUGE(nvmlDeviceGetPowerManagementDefaultLimit, power_limit_default_mw)
GAUGE(nvmlDeviceGetFanSpeed, fan_percent)
GAUGE(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation)
GAUGE(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
GAUGE(nvmlDeviceGetPcieReplayCounter, pcie_replays)

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t handle, unsigned int *min,
                                                          unsigned int *max) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetPowerManagementLimitConstraints, handle, &d);
    REQUIRE(min != NULL && max != NULL);
    struct standin_gauges gauges = standin_gauges(&d);
    REQUIRE_SUPPORT(gauges.power_limit_min_mw != STANDIN_ABSENT);
    *min = gauges.power_limit_min_mw;
    *max = gauges.power_limit_max_mw;
    return NVML_SUCCESS;
}

/* From Ampere on (but GA100) a one second average: the energy of the last whole sample periods. */
uint32_t standin_average_power_mw(const struct device *device) {
    uint64_t period = standin_state()->sample_period_ns;
    uint64_t slot = standin_now_ns() / period;
    uint64_t periods = (NS_PER_S + period / 2) / period;
    int64_t energy = standin_sampled_at(device, STANDIN_SAMPLED_ENERGY, slot) -
                     standin_sampled_at(device, STANDIN_SAMPLED_ENERGY, slot - periods);
    return (uint32_t)llround((double)energy * 1e9 / (double)(periods * period));
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t handle, unsigned int *power) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetPowerUsage, handle, &d);
    REQUIRE(power != NULL);
    struct standin_gauges gauges = standin_gauges(&d);
    REQUIRE_SUPPORT(d.mig == NULL && gauges.power_mw != STANDIN_ABSENT);
    bool averages = d.gpu->architecture >= NVML_DEVICE_ARCH_AMPERE &&
                    !(d.gpu->cc_major == 8 && d.gpu->cc_minor == 0); /* GA100 */
    *power = averages ? standin_average_power_mw(&d) : gauges.power_mw;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t handle, unsigned long long *energy) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetTotalEnergyConsumption, handle, &d);
    REQUIRE(energy != NULL);
    REQUIRE_SUPPORT(d.mig == NULL && d.gpu->cc_major >= 7); /* Volta */
    *energy = (unsigned long long)standin_counter(&d, STANDIN_ENERGY_MJ, standin_now_ns());
    return NVML_SUCCESS;
}

static nvmlReturn_t clock_of(const uint32_t clocks[4], nvmlClockType_t type, unsigned int *clock) {
    REQUIRE(clock != NULL && (unsigned int)type < 4);
    REQUIRE_SUPPORT(clocks[type] != STANDIN_ABSENT);
    *clock = clocks[type];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t handle, nvmlClockType_t type, unsigned int *clock) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetClockInfo, handle, &d);
    struct standin_gauges gauges = standin_gauges(&d);
    return clock_of(gauges.clock_mhz, type, clock);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t handle, nvmlClockType_t type, unsigned int *clock) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetMaxClockInfo, handle, &d);
    struct standin_gauges gauges = standin_gauges(&d);
    return clock_of(gauges.clock_max_mhz, type, clock);
}

static nvmlReturn_t event_reasons(const struct device *d, unsigned long long *reasons) {
    REQUIRE(reasons != NULL);
    *reasons = standin_gauges(d).event_reasons;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t handle, unsigned long long *reasons) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetCurrentClocksEventReasons, handle, &d);
    return event_reasons(&d, reasons);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t handle,
                                                       unsigned long long *reasons) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetCurrentClocksThrottleReasons, handle, &d);
    return event_reasons(&d, reasons);
}

nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t handle,
                                                      unsigned long long *reasons) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetSupportedClocksEventReasons, handle, &d);
    REQUIRE(reasons != NULL);
    *reasons = nvmlClocksEventReasonAll;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t handle, nvmlTemperatureSensors_t sensor,
                                      unsigned int *temperature) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetTemperature, handle, &d);
    REQUIRE(temperature != NULL && sensor == NVML_TEMPERATURE_GPU);
    REQUIRE_SUPPORT(d.mig == NULL);
    *temperature = (unsigned int)floor(standin_gauges(&d).temperature_celsius);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t handle, nvmlTemperature_t *temperature) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetTemperatureV, handle, &d);
    REQUIRE(temperature != NULL);
    REQUIRE_VERSION(temperature->version, nvmlTemperature_v1);
    REQUIRE(temperature->sensorType == NVML_TEMPERATURE_GPU);
    REQUIRE_SUPPORT(d.mig == NULL);
    temperature->temperature = (int)floor(standin_gauges(&d).temperature_celsius);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t handle, unsigned int *fans) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetNumFans, handle, &d);
    REQUIRE(fans != NULL);
    *fans = standin_gauges(&d).fan_percent == STANDIN_ABSENT ? 0 : 1;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t handle, nvmlPstates_t *pstate) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetPerformanceState, handle, &d);
    REQUIRE(pstate != NULL);
    *pstate = (nvmlPstates_t)standin_gauges(&d).pstate;
    return NVML_SUCCESS;
}
