// A CUDA driver that does nothing: every function succeeds at once. host_time.py measures with it what calls cost the host.
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#define ANSWER(name, type, value, ...) \
  static int name(type* out, ##__VA_ARGS__) { \
    *out = value; \
    return 0; \
  }

static char context[64];
static unsigned long long next_address = 1ull << 40;

ANSWER(cuCtxGetCurrent, void*, context)
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
  } known[] = {KNOWN(cuCtxGetCurrent), KNOWN(cuCtxGetDevice), KNOWN(cuDeviceGet),         KNOWN(cuDeviceGetAttribute),
               KNOWN(cuDeviceGetCount), KNOWN(cuMemAlloc),      KNOWN(cuMemHostAlloc), KNOWN(cuStreamCreate),      KNOWN(cuEventCreate),
               KNOWN(cuMemGetAllocationGranularity),
               KNOWN(cuMemCreate),
               KNOWN(cuMemExportToShareableHandle),
               KNOWN(cuMemImportFromShareableHandle),
               KNOWN(cuMemAddressReserve),
               KNOWN(cuMemGetInfo),    KNOWN(cuDeviceGetName), KNOWN(cuStreamIsCapturing)};
  *function = (void*)succeed;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(name, known[i].name)) *function = known[i].function;
  if (status) *status = 0;
  return 0;
}
