/* Processes on a device: who holds memory, who ran. */
#include "standin.h"

enum kind { COMPUTE, GRAPHICS, MPS };

/* The process table at one moment, without the torn rows of a writer that is inside. */
static uint32_t read_processes(const struct standin_gpu *gpu, struct standin_process *to) {
    uint32_t count;
    uint64_t seq;
    do {
        seq = standin_read_begin(gpu);
        count = gpu->process_count < STANDIN_PROCESSES ? gpu->process_count : STANDIN_PROCESSES;
        for (uint32_t i = 0; i < count; i++)
            to[i] = gpu->processes[i];
    } while (standin_read_retry(gpu, seq));
    return count;
}

static bool belongs(const struct device *d, const struct standin_process *process) {
    return d->mig == NULL || (process->gpu_instance == d->mig->gpu_instance &&
                              process->compute_instance == d->mig->compute_instance);
}

static nvmlReturn_t list(const struct device *d, enum kind kind, unsigned int *count,
                         nvmlProcessInfo_t *infos) {
    struct standin_process processes[STANDIN_PROCESSES];
    REQUIRE(count != NULL);
    uint32_t all = read_processes(d->gpu, processes);
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < all; i++) {
        if (processes[i].kind == kind && belongs(d, &processes[i]))
            processes[wanted++] = processes[i];
    }
    if (wanted > *count) {
        *count = wanted;
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    REQUIRE(infos != NULL || wanted == 0);
    for (uint32_t i = 0; i < wanted; i++) {
        infos[i].pid = processes[i].pid;
        infos[i].usedGpuMemory = processes[i].used_bytes; /* all ones: NVML_VALUE_NOT_AVAILABLE */
        infos[i].gpuInstanceId = processes[i].gpu_instance;
        infos[i].computeInstanceId = processes[i].compute_instance;
    }
    *count = wanted;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned int *count,
                                                     nvmlProcessInfo_t *infos) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetComputeRunningProcesses_v3, handle, &d);
    return list(&d, COMPUTE, count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t handle, unsigned int *count,
                                                      nvmlProcessInfo_t *infos) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetGraphicsRunningProcesses_v3, handle, &d);
    return list(&d, GRAPHICS, count, infos);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned int *count,
                                                        nvmlProcessInfo_t *infos) {
    struct device d;
    ENTER_DEVICE(nvmlDeviceGetMPSComputeRunningProcesses_v3, handle, &d);
    return list(&d, MPS, count, infos);
}

/* Processes "that had some non-zero utilization during the last sample period" (nvml.h). */
struct ran {
    uint32_t running;
    uint32_t count;
    unsigned long long timestamp_us;
    struct standin_process rows[STANDIN_PROCESSES];
};

static void read_ran(const struct device *d, unsigned long long seen_us, struct ran *ran) {
    uint64_t period = standin_state()->sample_period_ns;
    ran->timestamp_us = standin_timestamp_us(standin_now_ns() / period * period);
    ran->running = read_processes(d->gpu, ran->rows);
    ran->count = 0;
    if (ran->timestamp_us <= seen_us)
        return;
    for (uint32_t i = 0; i < ran->running; i++) {
        struct standin_process row = ran->rows[i];
        if (row.sm_percent + row.mem_percent + row.enc_percent + row.dec_percent > 0)
            ran->rows[ran->count++] = row;
    }
}

/*
 * What both utilization calls answer before they write rows. `room` is the caller's array, `needed` what
 * it should be. With no process at all a sizing call succeeds with zero; with idle ones nothing is found.
 */
static nvmlReturn_t sizing(const struct ran *ran, bool has_array, unsigned int room,
                           unsigned int *needed) {
    if (!has_array) {
        *needed = ran->running;
        return ran->running == 0 ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
    }
    if (ran->count == 0)
        return NVML_ERROR_NOT_FOUND;
    if (room < ran->count) {
        *needed = ran->running;
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    *needed = ran->count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t handle,
                                             nvmlProcessUtilizationSample_t *samples,
                                             unsigned int *count, unsigned long long seen_us) {
    struct device d;
    struct ran ran;
    ENTER_DEVICE(nvmlDeviceGetProcessUtilization, handle, &d);
    REQUIRE(count != NULL);
    REQUIRE_SUPPORT(d.mig == NULL && d.gpu->mig_enabled != 1);
    read_ran(&d, seen_us, &ran);
    nvmlReturn_t result = sizing(&ran, samples != NULL, *count, count);
    if (result != NVML_SUCCESS || samples == NULL)
        return result;
    for (uint32_t i = 0; i < ran.count; i++) {
        const struct standin_process *row = &ran.rows[i];
        samples[i] = (nvmlProcessUtilizationSample_t){
            .pid = row->pid,
            .timeStamp = ran.timestamp_us,
            .smUtil = row->sm_percent,
            .memUtil = row->mem_percent,
            .encUtil = row->enc_percent,
            .decUtil = row->dec_percent,
        };
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t handle,
                                                   nvmlProcessesUtilizationInfo_t *info) {
    struct device d;
    struct ran ran;
    ENTER_DEVICE(nvmlDeviceGetProcessesUtilizationInfo, handle, &d);
    REQUIRE(info != NULL);
    REQUIRE_VERSION(info->version, nvmlProcessesUtilizationInfo_v1);
    REQUIRE_SUPPORT(d.mig == NULL && d.gpu->mig_enabled != 1);
    read_ran(&d, info->lastSeenTimeStamp, &ran);
    nvmlReturn_t result = sizing(&ran, info->procUtilArray != NULL, info->processSamplesCount,
                                 &info->processSamplesCount);
    if (result != NVML_SUCCESS || info->procUtilArray == NULL)
        return result;
    for (uint32_t i = 0; i < ran.count; i++) {
        const struct standin_process *row = &ran.rows[i];
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){
            .timeStamp = ran.timestamp_us,
            .pid = row->pid,
            .smUtil = row->sm_percent,
            .memUtil = row->mem_percent,
            .encUtil = row->enc_percent,
            .decUtil = row->dec_percent,
        };
    }
    return NVML_SUCCESS;
}
