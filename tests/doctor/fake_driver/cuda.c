// A CUDA driver with H200s that are not there: as much of libcuda.so.1 as doctor asks. FAKE_GPUS: how many; FAKE_INIT: what cuInit returns,
// -1: it never does, -2: it crashes; FAKE_NO_ACCESS: GPUs 0 and 1 cannot reach each other.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef unsigned long long handle;

static int setting(const char* name, int fallback) { return getenv(name) ? atoi(getenv(name)) : fallback; }

int cuDriverGetVersion(int* version) {
  *version = setting("FAKE_CUDA", 13010);
  return 0;
}
int cuInit(unsigned flags) {
  int status = setting("FAKE_INIT", 0);
  if (status == -1) sleep(1000);
  if (status == -2) abort();
  return status;
}
int cuGetErrorName(int status, const char** name) {
  *name = status == 100 ? "CUDA_ERROR_NO_DEVICE" : status == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : NULL;
  return *name == NULL;
}
int cuDeviceGetCount(int* count) {
  *count = setting("FAKE_GPUS", 8);
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(16 * device + i);
  return 0;
}
int cuDeviceGetName(char* name, int size, int device) {
  snprintf(name, (size_t)size, "NVIDIA H200");
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 9 : 0;
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = 150754820096;
  return 0;
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = !(getenv("FAKE_NO_ACCESS") && device + peer == 1);
  return 0;
}

// Virtual memory: FAKE_NOT_SHARED lets the driver give out no descriptors of it.
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &setting;
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuMemGetAllocationGranularity(size_t* unit, const void* properties, int option) {
  *unit = 2 << 20;
  return 0;
}
int cuMemCreate(handle* memory, size_t size, const void* properties, handle flags) {
  *memory = 7;
  return 0;
}
int cuMemRelease(handle memory) { return 0; }
int cuMemExportToShareableHandle(int* descriptor, handle memory, int kind, handle flags) {
  *descriptor = dup(0);
  return getenv("FAKE_NOT_SHARED") ? 802 : 0;
}
int cuMemImportFromShareableHandle(handle* memory, void* descriptor, int kind) {
  *memory = 8;
  return (size_t)descriptor > 2 ? 0 : 1;
}
int cuMemAddressReserve(handle* address, size_t size, size_t alignment, handle at, handle flags) {
  *address = 1ull << 40;
  return 0;
}
int cuMemAddressFree(handle address, size_t size) { return 0; }
int cuMemMap(handle address, size_t size, size_t offset, handle memory, handle flags) { return memory == 8 ? 0 : 1; }
int cuMemUnmap(handle address, size_t size) { return 0; }
int cuMemSetAccess(handle address, size_t size, const void* access, size_t count) { return count == 1 ? 0 : 1; }
