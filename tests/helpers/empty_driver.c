// A CUDA driver that does nothing: every function succeeds at once. host_time.py measures with it what calls cost the host.
// EMPTY_DRIVER_START_MS=100,200: cuInit takes 100 ms and the first context 200 ms, as waits. Without it, a context is current.
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ANSWER(name, type, value, ...)        \
  static int name(type* out, ##__VA_ARGS__) { \
    *out = value;                             \
    return 0;                                 \
  }

enum { NOT_INITIALIZED = 3 };

static char context[64];
static unsigned long long next_address = 1ull << 40;
static int has_driver, has_context;
static _Thread_local void* current;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

// Take the time of a step of the start, if it is the first one. Return whether the steps take time.
static int start(int step, int* is_done) {
  int ms[2], takes_time = getenv("EMPTY_DRIVER_START_MS") && sscanf(getenv("EMPTY_DRIVER_START_MS"), "%d,%d", ms, ms + 1) == 2;
  if (is_done) {
    pthread_mutex_lock(&starting);
    if (takes_time && !*is_done) usleep(1000 * ms[step]);
    *is_done = 1;
    pthread_mutex_unlock(&starting);
  }
  return takes_time;
}
static int cuInit(unsigned flags) {
  start(0, &has_driver);
  return 0;
}
static int cuDevicePrimaryCtxRetain(void** out, int device) {
  start(1, &has_context);
  *out = context;
  return 0;
}
static int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = has_context;
  return 0;
}
static int cuCtxSetCurrent(void* given) {
  current = given;
  return 0;
}
static int cuCtxGetCurrent(void** out) {
  int takes_time = start(0, NULL);
  *out = takes_time ? current : context;
  return takes_time && !has_driver ? NOT_INITIALIZED : 0;
}
ANSWER(cuCtxGetDevice, int, 0)
ANSWER(cuDeviceGet, int, ordinal, int ordinal)
ANSWER(cuDeviceGetCount, int, 1)
// 75 and 76 are the two parts of the compute capability, so kernels are those of sm_90. Every other attribute is the number of SMs.
ANSWER(cuDeviceGetAttribute, int, attribute == 75 ? 9 : attribute == 76 ? 0 : 132, int attribute, int device)
ANSWER(cuMemAlloc, unsigned long long, next_address += 1ull << 32, size_t num_bytes)
ANSWER(cuMemHostAlloc, void*, calloc(1, num_bytes), size_t num_bytes, unsigned flags)
ANSWER(cuStreamCreate, unsigned long long, next_address += 4096, unsigned flags)
ANSWER(cuEventCreate, unsigned long long, next_address += 4096, unsigned flags)

// Virtual memory. A descriptor of it is one of nothing, which ranks can pass on.
ANSWER(cuMemGetAllocationGranularity, size_t, 2u << 20, const void* properties, int option)
ANSWER(cuMemCreate, unsigned long long, next_address += 4096, size_t num_bytes, const void* properties, unsigned long long flags)
ANSWER(cuMemExportToShareableHandle, int, open("/dev/null", O_RDONLY | O_CLOEXEC), unsigned long long memory, int kind,
       unsigned long long flags)
ANSWER(cuMemImportFromShareableHandle, unsigned long long, next_address += 4096, void* descriptor, int kind)
ANSWER(cuMemAddressReserve, unsigned long long, next_address += 1ull << 40, size_t num_bytes, size_t alignment, unsigned long long at,
       unsigned long long flags)

static int cuMemGetInfo(size_t* free_bytes, size_t* num_bytes) {
  *free_bytes = *num_bytes = 1ull << 50;
  return 0;
}
static int cuStreamIsCapturing(void* stream, int* status) {
  *status = 0;
  return 0;
}
static int cuDeviceGetName(char* name, int size, int device) {
  strncpy(name, "no GPU", (size_t)size);
  return 0;
}
static int succeed(void) { return 0; }

#define KNOWN(name) {#name, (void*)name}

int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags, int* status) {
  static const struct {
    const char* name;
    void* function;
  } known[] = {KNOWN(cuInit),
               KNOWN(cuDevicePrimaryCtxRetain),
               KNOWN(cuDevicePrimaryCtxGetState),
               KNOWN(cuCtxSetCurrent),
               KNOWN(cuCtxGetCurrent),
               KNOWN(cuCtxGetDevice),
               KNOWN(cuDeviceGet),
               KNOWN(cuDeviceGetAttribute),
               KNOWN(cuDeviceGetCount),
               KNOWN(cuMemAlloc),
               KNOWN(cuMemHostAlloc),
               KNOWN(cuStreamCreate),
               KNOWN(cuEventCreate),
               KNOWN(cuMemGetAllocationGranularity),
               KNOWN(cuMemCreate),
               KNOWN(cuMemExportToShareableHandle),
               KNOWN(cuMemImportFromShareableHandle),
               KNOWN(cuMemAddressReserve),
               KNOWN(cuMemGetInfo),
               KNOWN(cuDeviceGetName),
               KNOWN(cuStreamIsCapturing)};
  *function = (void*)succeed;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(name, known[i].name)) *function = known[i].function;
  if (status) *status = 0;
  return 0;
}
