/*
 * Calls every function of the stand-in NVML library from several threads, with good arguments and bad
 * ones. For valgrind and the sanitizers: they judge, the return codes are tested elsewhere.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

enum { THREADS = 4, ROUNDS = 20, ROWS = 80 };

#define CHECK(call)                                                                 \
    do {                                                                            \
        nvmlReturn_t code_ = (call);                                                \
        if (code_ != NVML_SUCCESS) {                                                \
            fprintf(stderr, "%s: %s\n", #call, nvmlErrorString(code_));             \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

static void identity(nvmlDevice_t h) {
    char text[96];
    unsigned int number;
    int major, minor;
    nvmlPciInfo_t pci;
    nvmlPciInfoExt_t ext = {.version = nvmlPciInfoExt_v1};
    nvmlDevice_t again;
    CHECK(nvmlSystemGetDriverVersion(text, sizeof text));
    CHECK(nvmlSystemGetNVMLVersion(text, sizeof text));
    CHECK(nvmlSystemGetCudaDriverVersion(&major));
    CHECK(nvmlSystemGetCudaDriverVersion_v2(&major));
    CHECK(nvmlDeviceGetName(h, text, sizeof text));
    CHECK(nvmlDeviceGetSerial(h, text, sizeof text));
    CHECK(nvmlDeviceGetHandleBySerial(text, &again));
    CHECK(nvmlDeviceGetUUID(h, text, sizeof text));
    CHECK(nvmlDeviceGetHandleByUUID(text, &again));
    CHECK(nvmlDeviceGetPciInfo_v3(h, &pci));
    CHECK(nvmlDeviceGetHandleByPciBusId_v2(pci.busId, &again));
    CHECK(nvmlDeviceGetPciInfoExt(h, &ext));
    CHECK(nvmlDeviceGetIndex(h, &number));
    CHECK(nvmlDeviceGetCudaComputeCapability(h, &major, &minor));
    if (nvmlDeviceGetName(h, text, 3) != NVML_ERROR_INSUFFICIENT_SIZE)
        exit(1);
    if (nvmlDeviceGetName(NULL, text, sizeof text) != NVML_ERROR_INVALID_ARGUMENT)
        exit(1);
    if (nvmlDeviceGetHandleByUUID(NULL, &again) != NVML_ERROR_INVALID_ARGUMENT)
        exit(1);
}

/* Getters of one unsigned number. */
static void numbers(nvmlDevice_t h) {
    static nvmlReturn_t (*const getters[])(nvmlDevice_t, unsigned int *) = {
        nvmlDeviceGetMinorNumber,
        nvmlDeviceGetNumaNodeId,
        nvmlDeviceGetModuleId,
        nvmlDeviceGetBoardId,
        nvmlDeviceGetMultiGpuBoard,
        nvmlDeviceGetNumGpuCores,
        nvmlDeviceGetPowerUsage,
        nvmlDeviceGetPowerManagementLimit,
        nvmlDeviceGetPowerManagementDefaultLimit,
        nvmlDeviceGetEnforcedPowerLimit,
        nvmlDeviceGetCurrPcieLinkGeneration,
        nvmlDeviceGetCurrPcieLinkWidth,
        nvmlDeviceGetMaxPcieLinkGeneration,
        nvmlDeviceGetGpuMaxPcieLinkGeneration,
        nvmlDeviceGetMaxPcieLinkWidth,
        nvmlDeviceGetPcieReplayCounter,
        nvmlDeviceGetNumFans,
        nvmlDeviceGetMaxMigDeviceCount,
        nvmlDeviceIsMigDeviceHandle,
    };
    unsigned int value;
    for (size_t i = 0; i < sizeof getters / sizeof *getters; i++) {
        CHECK(getters[i](h, &value));
        if (getters[i](h, NULL) != NVML_ERROR_INVALID_ARGUMENT)
            exit(1);
    }
}

static void moments(nvmlDevice_t h) {
    nvmlMemory_t memory;
    nvmlMemory_v2_t memory2 = {.version = nvmlMemory_v2};
    nvmlBAR1Memory_t bar1;
    nvmlUtilization_t utilization;
    nvmlTemperature_t temperature = {.version = nvmlTemperature_v1};
    nvmlRowRemapperHistogramValues_t histogram;
    unsigned long long large;
    unsigned int a, b, c, d;
    CHECK(nvmlDeviceGetMemoryInfo(h, &memory));
    CHECK(nvmlDeviceGetMemoryInfo_v2(h, &memory2));
    CHECK(nvmlDeviceGetBAR1MemoryInfo(h, &bar1));
    CHECK(nvmlDeviceGetUtilizationRates(h, &utilization));
    CHECK(nvmlDeviceGetTemperatureV(h, &temperature));
    CHECK(nvmlDeviceGetTotalEnergyConsumption(h, &large));
    CHECK(nvmlDeviceGetCurrentClocksEventReasons(h, &large));
    CHECK(nvmlDeviceGetEncoderUtilization(h, &a, &b));
    CHECK(nvmlDeviceGetClockInfo(h, NVML_CLOCK_SM, &a));
    CHECK(nvmlDeviceGetTotalEccErrors(h, NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC, &large));
    CHECK(nvmlDeviceGetMemoryErrorCounter(h, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC,
                                          NVML_MEMORY_LOCATION_SRAM, &large));
    CHECK(nvmlDeviceGetRemappedRows(h, &a, &b, &c, &d));
    CHECK(nvmlDeviceGetRowRemapperHistogram(h, &histogram));
}

static void lists(nvmlDevice_t h) {
    nvmlProcessInfo_t processes[ROWS];
    nvmlSample_t samples[ROWS];
    nvmlFieldValue_t fields[ROWS];
    nvmlProcessUtilizationInfo_v1_t rows[ROWS];
    nvmlProcessesUtilizationInfo_t info = {
        .version = nvmlProcessesUtilizationInfo_v1, .processSamplesCount = ROWS, .procUtilArray = rows};
    nvmlValueType_t type;
    unsigned int count = 0;
    if (nvmlDeviceGetComputeRunningProcesses_v3(h, &count, NULL) != NVML_ERROR_INSUFFICIENT_SIZE)
        exit(1);
    CHECK(nvmlDeviceGetComputeRunningProcesses_v3(h, &count, processes));
    CHECK(nvmlDeviceGetProcessesUtilizationInfo(h, &info));
    count = ROWS;
    CHECK(nvmlDeviceGetSamples(h, NVML_GPU_UTILIZATION_SAMPLES, 0, &type, &count, samples));
    memset(fields, 0, sizeof fields);
    for (unsigned int first = 0; first < 400; first += ROWS) {
        for (unsigned int i = 0; i < ROWS; i++)
            fields[i].fieldId = first + i;
        CHECK(nvmlDeviceGetFieldValues(h, ROWS, fields));
    }
}

static void activity(nvmlDevice_t h) {
    /* As small as a caller built against another header may make it: two entries, on the heap. By
     * way of a plain pointer, since compilers warn of too little room for the type. */
    void *room = calloc(1, offsetof(nvmlGpmMetricsGet_t, metrics[2]));
    nvmlGpmMetricsGet_t *get = room;
    get->version = NVML_GPM_METRICS_GET_VERSION;
    get->numMetrics = 2;
    CHECK(nvmlGpmSampleAlloc(&get->sample1));
    CHECK(nvmlGpmSampleAlloc(&get->sample2));
    CHECK(nvmlGpmSampleGet(h, get->sample1));
    CHECK(nvmlGpmSampleGet(h, get->sample2));
    get->metrics[0].metricId = NVML_GPM_METRIC_SM_UTIL;
    get->metrics[1].metricId = NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC;
    CHECK(nvmlGpmMetricsGet(get));
    CHECK(nvmlGpmSampleFree(get->sample1));
    CHECK(nvmlGpmSampleFree(get->sample2));
    free(get);
}

static void events(nvmlDevice_t h) {
    nvmlEventSet_t set;
    nvmlEventData_t data;
    CHECK(nvmlEventSetCreate(&set));
    CHECK(nvmlDeviceRegisterEvents(h, nvmlEventTypeXidCriticalError, set));
    if (nvmlEventSetWait_v2(set, &data, 1) != NVML_ERROR_TIMEOUT)
        exit(1);
    CHECK(nvmlEventSetFree(set));
}

static void *work(void *unused) {
    for (int round = 0; round < ROUNDS; round++) {
        nvmlDevice_t h;
        unsigned int count;
        CHECK(nvmlInitWithFlags(0));
        CHECK(nvmlDeviceGetCount_v2(&count));
        CHECK(nvmlDeviceGetHandleByIndex_v2((unsigned int)round % count, &h));
        identity(h);
        numbers(h);
        for (int i = 0; i < ROUNDS; i++) /* no lock but the page's in here */
            moments(h);
        lists(h);
        activity(h);
        events(h);
        CHECK(nvmlShutdown());
    }
    return unused;
}

int main(void) {
    pthread_t threads[THREADS];
    /* One reference of the main thread: the others come and go above it. */
    CHECK(nvmlInit_v2());
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(nvmlShutdown());
    return 0;
}
