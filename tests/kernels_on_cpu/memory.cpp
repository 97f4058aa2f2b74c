// Weak memory: stores to the symmetric memory of another GPU arrive late, word by word and in random order. Only a release (or fence) of a
// thread waits for earlier stores: its own, those of its warp that __syncwarp ordered, and those of its block that a barrier or a release
// of the block ordered. Bulk copies write as the thread that started them. Loads are in order, and stores to a GPU's own memory are visible
// at once. Pinned memory of the host is remote to all GPUs. A GPU sees its own stores there.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace cpu_gpu {
namespace {

constexpr size_t kPage = 4096, kAlignment = 256, kMaxInFlight = 1024;

struct Region {
  char *begin, *end;
  int gpu;
};

struct Store {
  char* to;
  char value[8];
  unsigned num_bytes;
  const Thread* thread;
  const void *warp, *block, *grid;
  int gpu;
  bool for_warp, for_block;  // whether the whole warp, or block, may release it
};

bool is_weak = false;
std::vector<Region> regions;
std::vector<std::pair<const char*, const char*>> clocks;  // words with which waiting kernels keep time
std::vector<Store> in_flight;                             // in the order of the program
std::map<void*, std::pair<void*, size_t>> allocations;    // the mapping of each allocation, and its size

const void* watched = nullptr;  // and the loads from there
uint64_t num_watched = 0;

void deliver(size_t i) {
  for (size_t earlier = 0; earlier < i; ++earlier) {  // stores to one address arrive in order
    if (in_flight[earlier].to < in_flight[i].to + in_flight[i].num_bytes &&
        in_flight[i].to < in_flight[earlier].to + in_flight[earlier].num_bytes) {
      i = earlier;
      break;
    }
  }
  memcpy(in_flight[i].to, in_flight[i].value, in_flight[i].num_bytes);
  in_flight.erase(in_flight.begin() + i);
}

// Whether a release by a thread follows the store.
bool is_released_by(const Store& s, const Thread& t) {
  return s.thread == &t || (s.for_warp && s.warp == t.warp_key) || (s.for_block && s.block == t.block_key);
}

template <class Which>
void deliver_all(Which which) {
  const auto first = std::find_if(in_flight.begin(), in_flight.end(), which);  // most loads find none
  auto kept = first;
  for (auto s = first; s != in_flight.end(); ++s) {
    if (which(*s)) {
      memcpy(s->to, s->value, s->num_bytes);
    } else {
      *kept++ = *s;
    }
  }
  in_flight.erase(kept, in_flight.end());
}

void send(void* to, const void* from, unsigned num_bytes, const Thread& t) {
  for (unsigned at = 0; at < num_bytes; at += 8) {
    Store s = {static_cast<char*>(to) + at,
               {},
               num_bytes - at < 8 ? num_bytes - at : 8,
               &t,
               t.warp_key,
               t.block_key,
               t.grid_key,
               t.gpu,
               false,
               false};
    memcpy(s.value, static_cast<const char*>(from) + at, s.num_bytes);
    in_flight.push_back(s);
  }
  while (in_flight.size() > kMaxInFlight) deliver(random_below(in_flight.size()));
}

void send_now(void* to, const void* from, unsigned num_bytes) {
  touch(to);
  send(to, from, num_bytes, *running);
}

// A load from pinned memory does not pass the earlier stores of its GPU there.
void see_own_stores(const void* from, size_t num_bytes) {
  if (in_flight.empty() || !is_remote(from)) return;
  const char* begin = static_cast<const char*>(from);
  deliver_all([&](const Store& s) { return s.gpu == running->gpu && s.to < begin + num_bytes && begin < s.to + s.num_bytes; });
}

void before_plain_load(const void* from, unsigned num_bytes) {
  if (!is_weak) return;
  step(false);
  note_shared_access(from, num_bytes, false);
  see_own_stores(from, num_bytes);
}

// The runtime learns of a plain store before it happens. Nothing else runs until it has happened. Then the runtime undoes and sends it.
struct PlainStore {
  char* to = nullptr;
  char before[16];
  unsigned num_bytes;
} plain;

void before_plain_store(void* to, unsigned num_bytes) {
  if (!is_weak) return;
  step(!is_on_own_stack(to));
  note_shared_access(to, num_bytes, true);
  if (!is_remote(to)) return;
  plain.to = static_cast<char*>(to), plain.num_bytes = num_bytes;
  memcpy(plain.before, to, num_bytes);
}

}  // namespace

bool keeps_time(const void* p) {
  return std::any_of(clocks.begin(), clocks.end(), [p](auto& clock) { return p >= clock.first && p < clock.second; });
}

bool is_remote(const void* p) {
  if (!is_weak || !running || is_on_own_stack(p)) return false;
  for (const Region& r : regions) {
    if (p >= r.begin && p < r.end) return r.gpu != running->gpu;
  }
  return false;
}

void write_of_copy(void* to, const char* from, size_t num_bytes, const Thread& thread, bool is_remote) {
  if (is_remote) {
    send(to, from, num_bytes, thread);
  } else {
    memcpy(to, from, num_bytes);
  }
}

void complete_plain_store() {
  if (!plain.to) return;
  char value[16];
  memcpy(value, plain.to, plain.num_bytes);
  memcpy(plain.to, plain.before, plain.num_bytes);
  char* to = std::exchange(plain.to, nullptr);
  send_now(to, value, plain.num_bytes);
}

void reset_memory(bool weak) { is_weak = weak, in_flight.clear(), regions.clear(), clocks.clear(), plain.to = nullptr; }

void order_within_warp(const void* warp) {
  for (Store& s : in_flight) s.for_warp |= s.warp == warp;
}

void order_within_block(const void* warp) {
  for (Store& s : in_flight) s.for_block |= s.warp == warp;
}

bool deliver_stores() {
  if (in_flight.empty()) return false;
  for (uint64_t count = 1 + random_below(8); count && !in_flight.empty(); --count) deliver(random_below(in_flight.size()));
  return true;
}

void deliver_stores_of(const void* grid) {
  deliver_all([&](const Store& s) { return s.grid == grid; });
}

void read(const void* from, void* to, size_t num_bytes) {
  step(false);
  num_watched += from == watched;
  note_shared_access(from, num_bytes, false);
  see_own_stores(from, num_bytes);
  memcpy(to, from, num_bytes);
}

void write(void* to, const void* from, size_t num_bytes, Order order) {
  if (order == Order::kRelease) fence();
  if (order == Order::kReleaseBlock) {
    for (Store& s : in_flight) s.for_block |= is_released_by(s, *running);
  }
  step(!keeps_time(to) || memcmp(to, from, num_bytes) != 0);
  note_shared_access(to, num_bytes, true);
  if (is_remote(to)) {
    send_now(to, from, num_bytes);
  } else {
    memcpy(to, from, num_bytes);
  }
}

void fence() {
  step(false);
  deliver_all([](const Store& s) { return is_released_by(s, *running); });
}

}  // namespace cpu_gpu

using namespace cpu_gpu;

extern "C" {

// Allocates memory full of garbage. It ends at the end of a page, and the pages around it are protected.
void* gpu_allocate(size_t num_bytes) {
  const size_t aligned = (num_bytes + kAlignment - 1) / kAlignment * kAlignment, inner = (aligned + kPage - 1) / kPage * kPage;
  char* memory = static_cast<char*>(mmap(nullptr, inner + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  mprotect(memory + kPage, inner, PROT_READ | PROT_WRITE);
  char* first = memory + kPage + inner - aligned;
  memset(first, kGarbage, aligned);
  allocations[first] = {memory, inner + 2 * kPage};
  return first;
}

void gpu_free(void* memory) {
  auto found = allocations.find(memory);
  const char *begin = static_cast<char*>(found->second.first), *end = begin + found->second.second;
  clocks.erase(std::remove_if(clocks.begin(), clocks.end(), [&](auto& clock) { return clock.first >= begin && clock.first < end; }),
               clocks.end());
  munmap(found->second.first, found->second.second);
  allocations.erase(found);
}

// Marks symmetric memory of a GPU, or pinned memory (gpu -1). If memory is weak, stores of other GPUs arrive there late.
void gpu_share(int gpu, char* memory, size_t num_bytes) { regions.push_back({memory, memory + num_bytes, gpu}); }

// Marks words with which waiting kernels keep time: atomics there, and stores of the same value, have no effect on others.
void gpu_keeps_time(const char* memory, size_t num_bytes) { clocks.emplace_back(memory, memory + num_bytes); }

// Counts the loads of kernels from an address from now on.
void gpu_watch(const void* address) { watched = address, num_watched = 0; }
uint64_t gpu_watched() { return num_watched; }

// With -fsanitize=thread, the compiler calls these before each load and store. Only with weak memory does the scheduler learn of them.
void __tsan_init() {}
#define ACCESS(n)                                                     \
  void __tsan_read##n(void* p) { before_plain_load(p, n); }           \
  void __tsan_write##n(void* p) { before_plain_store(p, n); }         \
  void __tsan_unaligned_read##n(void* p) { before_plain_load(p, n); } \
  void __tsan_unaligned_write##n(void* p) { before_plain_store(p, n); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, size_t num_bytes) { before_plain_load(p, num_bytes); }
void __tsan_write_range(void* p, size_t num_bytes) {
  if (num_bytes <= 16) return before_plain_store(p, num_bytes);
  if (is_weak) step(!is_on_own_stack(p));
}
}
