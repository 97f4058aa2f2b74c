// NVML for the same GPUs, and for as many others as FAKE_HIDDEN_GPUS says: the functions of libnvidia-ml.so.1 that doctor calls through pynvml.
// The last GPU knows neither MIG nor its memory. FAKE_NO_ACCESS: GPUs 0 and 1 cannot reach each other. FAKE_LOST: a GPU that does not answer; FAKE_NVLINKS: active links of GPU 1; the others have 18.
#include <stdio.h>
#include <stdlib.h>

typedef char* Device;
static char gpus[64];
static int setting(const char* name, int fallback) { return getenv(name) ? atoi(getenv(name)) : fallback; }
static unsigned number(void) { return (unsigned)(setting("FAKE_GPUS", 8) + setting("FAKE_HIDDEN_GPUS", 0)); }
static int is_last(Device d) { return d - gpus == (int)number() - 1; }

int nvmlInitWithFlags(unsigned flags) { return setting("FAKE_NVML", 0); }
int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "590.12.01");
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = number();
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  *device = gpus + index;
  return (int)index == setting("FAKE_LOST", -1) ? 15 : 0;
}
int nvmlDeviceGetUUID(Device d, char* text, unsigned size) {
  int n = snprintf(text, size, "GPU-");
  for (int i = 0; i < 16; i++)
    n += snprintf(text + n, size - (unsigned)n, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", (unsigned char)(16 * (d - gpus) + i));
  return 0;
}
int nvmlDeviceGetName(Device d, char* text, unsigned size) {
  snprintf(text, size, "NVIDIA H200");
  return 0;
}
int nvmlDeviceGetMigMode(Device d, unsigned* now, unsigned* pending) {
  *now = 0;
  *pending = 1;
  return is_last(d) ? 3 : 0;
}
int nvmlDeviceGetMemoryInfo(Device d, unsigned long long* total_free_used) {
  total_free_used[0] = 150754820096;
  total_free_used[1] = 150000000000 + (d - gpus);
  total_free_used[2] = 7;
  return is_last(d) ? 3 : 0;
}
int nvmlDeviceGetNvLinkState(Device d, unsigned link, unsigned* active) {
  *active = (int)link < (d - gpus == 1 ? setting("FAKE_NVLINKS", 18) : 18);
  return link < 18 ? 0 : 2;
}
int nvmlDeviceGetP2PStatus(Device a, Device b, int index, unsigned* status) {
  int is_apart = getenv("FAKE_NO_ACCESS") && a - gpus + (b - gpus) == 1;
  *status = index == 2 ? (getenv("FAKE_PCIE") ? 4 : 0) : is_apart ? 3 : 0;
  return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(Device a, Device b, unsigned* level) {
  *level = 50;
  return 0;
}
