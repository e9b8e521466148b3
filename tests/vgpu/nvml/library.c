/* Start and stop of the library, enumeration, handles, and the entry that every function passes. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "standin.h"

#define ENVIRONMENT "WHYIDLE_STANDIN_NVML"

/* A handle is opaque, so it is no pointer: tag, generation, MIG epoch, MIG index + 1, slot + 1. */
#define HANDLE_TAG 0x4e56ULL

static struct {
    pthread_mutex_t lock;
    struct standin_state *mapped;
    char path[4096];
    uint32_t references;
    uint32_t generation;
    uint32_t blocked; /* calls of this process inside a fault: the mapping must stay */
    uint32_t count;
    uint32_t order[STANDIN_GPUS];
} library = {.lock = PTHREAD_MUTEX_INITIALIZER};

struct standin_state *standin_state(void) {
    return __atomic_load_n(&library.mapped, __ATOMIC_ACQUIRE);
}

static bool initialised(void) {
    return __atomic_load_n(&library.references, __ATOMIC_ACQUIRE) > 0;
}

/* Names are written into the file, so that a reader of the counts needs no second list. */
static void publish_names(struct standin_state *state) {
    static const char *const names[] = {
#define X(name) #name,
        STANDIN_FUNCTION_LIST(X)
#undef X
    };
    _Static_assert((int)FN_COUNT <= (int)STANDIN_FUNCTIONS, "raise STANDIN_FUNCTIONS");
    for (size_t i = 0; i < FN_COUNT; i++)
        snprintf(state->calls[i].function, sizeof state->calls[i].function, "%s", names[i]);
}

static struct standin_state *map_state(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct stat st;
    void *address = MAP_FAILED;
    if (fstat(fd, &st) == 0 && (size_t)st.st_size >= sizeof(struct standin_state))
        address = mmap(NULL, sizeof(struct standin_state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (address == MAP_FAILED)
        return NULL;
    struct standin_state *state = address;
    if (state->magic != STANDIN_MAGIC || state->version != STANDIN_VERSION ||
        state->size != sizeof *state || state->gpu_count > STANDIN_GPUS) {
        munmap(address, sizeof *state);
        return NULL;
    }
    publish_names(state);
    return state;
}

/* Maps the file that the environment names; keeps the mapping as long as the name does not change. */
static nvmlReturn_t attach(void) {
    const char *path = getenv(ENVIRONMENT);
    if (path == NULL || strlen(path) >= sizeof library.path) {
        fprintf(stderr, "stand-in NVML: set " ENVIRONMENT " to a state file\n");
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    if (library.mapped != NULL && strcmp(path, library.path) == 0)
        return NVML_SUCCESS;
    struct standin_state *state = map_state(path);
    if (state == NULL) {
        fprintf(stderr, "stand-in NVML: %s is no state file of this version\n", path);
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    struct standin_state *old = library.mapped;
    __atomic_store_n(&library.mapped, state, __ATOMIC_RELEASE);
    strcpy(library.path, path);
    /* A call that is still blocked reads the old file when it wakes. */
    if (old != NULL && __atomic_load_n(&library.blocked, __ATOMIC_ACQUIRE) == 0)
        munmap(old, sizeof *old);
    return NVML_SUCCESS;
}

/* A GPU that is off the bus when the driver is asked anew is not enumerated; the others move up. */
static bool enumerated(const struct standin_gpu *gpu) {
    return gpu->lost != NVML_ERROR_GPU_IS_LOST && gpu->lost != NVML_ERROR_UNKNOWN;
}

static void enumerate(const struct standin_state *state) {
    library.count = 0;
    for (uint32_t i = 0; i < state->order_count && i < STANDIN_GPUS; i++) {
        uint32_t slot = state->order[i];
        if (slot < state->gpu_count && enumerated(&state->gpus[slot]))
            library.order[library.count++] = slot;
    }
}

static nvmlReturn_t initialise(enum function_id fn) {
    pthread_mutex_lock(&library.lock);
    nvmlReturn_t result = library.references > 0 ? NVML_SUCCESS : attach();
    pthread_mutex_unlock(&library.lock);
    if (result != NVML_SUCCESS)
        return result;
    result = standin_fault(fn, STANDIN_ANY_GPU, true);
    if (result != NVML_SUCCESS)
        return result;
    pthread_mutex_lock(&library.lock);
    if (library.references == 0) {
        library.generation = (library.generation + 1) & 0xFFFF;
        enumerate(library.mapped);
    }
    __atomic_add_fetch(&library.references, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&library.lock);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) {
    return initialise(FN_nvmlInit_v2);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    REQUIRE((flags & ~(unsigned int)(NVML_INIT_FLAG_NO_GPUS | NVML_INIT_FLAG_NO_ATTACH)) == 0);
    return initialise(FN_nvmlInitWithFlags);
}

nvmlReturn_t nvmlShutdown(void) {
    ENTER_LOCAL(nvmlShutdown);
    pthread_mutex_lock(&library.lock);
    nvmlReturn_t result = NVML_ERROR_UNINITIALIZED;
    if (library.references > 0) {
        __atomic_sub_fetch(&library.references, 1, __ATOMIC_RELEASE);
        result = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&library.lock);
    return result;
}

void standin_blocked(struct standin_state *state, int change) {
    __atomic_add_fetch(&library.blocked, (uint32_t)change, __ATOMIC_ACQ_REL);
    __atomic_add_fetch(&state->blocked, (uint32_t)change, __ATOMIC_ACQ_REL);
}

nvmlReturn_t standin_enter_slot(enum function_id fn, uint32_t slot) {
    if (!initialised())
        return NVML_ERROR_UNINITIALIZED;
    return standin_fault(fn, slot, true);
}

nvmlReturn_t standin_enter(enum function_id fn) {
    return standin_enter_slot(fn, STANDIN_ANY_GPU);
}

nvmlReturn_t standin_enter_local(enum function_id fn) {
    if (!initialised())
        return NVML_ERROR_UNINITIALIZED;
    return standin_fault(fn, STANDIN_ANY_GPU, false);
}

static nvmlDevice_t make_handle(uint32_t slot, uint64_t mig) {
    uint64_t word = HANDLE_TAG << 48 | (uint64_t)library.generation << 32 | mig << 8 | (slot + 1);
    return (nvmlDevice_t)(uintptr_t)word; /* never dereferenced */
}

nvmlDevice_t standin_handle(uint32_t slot) {
    return make_handle(slot, 0);
}

nvmlDevice_t standin_mig_handle(uint32_t slot, uint32_t mig_index) {
    uint64_t epoch = standin_state()->gpus[slot].mig_epoch & 0xFF;
    return make_handle(slot, epoch << 8 | (mig_index + 1));
}

static nvmlReturn_t resolve(nvmlDevice_t handle, struct device *device) {
    uint64_t word = (uint64_t)(uintptr_t)handle;
    struct standin_state *state = standin_state();
    uint32_t slot = (uint32_t)(word & 0xFF) - 1;
    uint32_t mig = (uint32_t)(word >> 8 & 0xFF);
    uint32_t epoch = (uint32_t)(word >> 16 & 0xFF);
    REQUIRE(word >> 48 == HANDLE_TAG && (word >> 32 & 0xFFFF) == library.generation);
    REQUIRE(slot < state->gpu_count);
    struct standin_gpu *gpu = &state->gpus[slot];
    if (mig != 0)
        REQUIRE(mig <= gpu->mig_count && mig <= STANDIN_MIGS && epoch == (gpu->mig_epoch & 0xFF));
    device->gpu = gpu;
    device->slot = slot;
    device->mig_index = mig == 0 ? 0 : mig - 1;
    device->mig = mig == 0 ? NULL : &gpu->migs[mig - 1];
    return NVML_SUCCESS;
}

nvmlReturn_t standin_enter_device(enum function_id fn, nvmlDevice_t handle, struct device *device) {
    if (!initialised())
        return NVML_ERROR_UNINITIALIZED;
    nvmlReturn_t result = resolve(handle, device);
    if (result != NVML_SUCCESS)
        return result;
    result = standin_fault(fn, device->slot, true);
    if (result != NVML_SUCCESS)
        return result;
    return (nvmlReturn_t)__atomic_load_n(&device->gpu->lost, __ATOMIC_ACQUIRE);
}

uint32_t standin_device_count(void) {
    return library.count;
}

bool standin_slot_of_index(uint32_t index, uint32_t *slot) {
    if (index >= library.count)
        return false;
    *slot = library.order[index];
    return true;
}

bool standin_index_of_slot(uint32_t slot, uint32_t *index) {
    for (uint32_t i = 0; i < library.count; i++) {
        if (library.order[i] == slot) {
            *index = i;
            return true;
        }
    }
    return false;
}
