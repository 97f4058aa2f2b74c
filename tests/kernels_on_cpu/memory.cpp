// Weak memory: what a thread stores in the symmetric memory of another GPU gets there some time later, in random order, word by word. Only
// a release (or fence) of a thread waits for all stores that come before it: its own, those of its warp that __syncwarp ordered, and those
// of its block that a barrier ordered. Loads are in order, and stores in a GPU's own memory are seen at once.
#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace cpu_gpu {
namespace {

constexpr size_t kPage = 4096, kAlignment = 256, kMostUnderWay = 1024;

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
  bool for_warp, for_block;  // who may release it, besides the thread
};

bool is_weak = false;
std::vector<Region> regions;
std::vector<Store> under_way;                           // in the order in which they were made
std::map<void*, std::pair<void*, size_t>> allocations;  // what mmap gave, and how much of it

bool is_elsewhere(const void* p) {
  if (!is_weak || !running) return false;
  for (const Region& r : regions) {
    if (p >= r.begin && p < r.end) return r.gpu != running->gpu;
  }
  return false;
}

void arrive(size_t i) {
  for (size_t earlier = 0; earlier < i; ++earlier) {  // of those to one place, the first one comes first
    if (under_way[earlier].to < under_way[i].to + under_way[i].num_bytes &&
        under_way[i].to < under_way[earlier].to + under_way[earlier].num_bytes) {
      i = earlier;
      break;
    }
  }
  memcpy(under_way[i].to, under_way[i].value, under_way[i].num_bytes);
  under_way.erase(under_way.begin() + i);
}

template <class Which>
void arrive_all(Which which) {
  size_t kept = 0;
  for (const Store& s : under_way) {
    if (which(s)) {
      memcpy(s.to, s.value, s.num_bytes);
    } else {
      under_way[kept++] = s;
    }
  }
  under_way.resize(kept);
}

void send(void* to, const void* from, unsigned num_bytes) {
  const Thread& t = *running;
  for (unsigned at = 0; at < num_bytes; at += 8) {
    Store s = {
        static_cast<char*>(to) + at, {}, num_bytes - at < 8 ? num_bytes - at : 8, &t, t.warp_key, t.block_key, t.grid_key, false, false};
    memcpy(s.value, static_cast<const char*>(from) + at, s.num_bytes);
    under_way.push_back(s);
  }
  while (under_way.size() > kMostUnderWay) arrive(random_below(under_way.size()));
}

// A store that the compiler made is known before it is done. Nothing else runs until it is: then it is taken back, and sent.
struct PlainStore {
  char* to = nullptr;
  char before[16];
  unsigned num_bytes;
} plain;

void before_plain_store(void* to, unsigned num_bytes) {
  step(true);
  if (!is_elsewhere(to)) return;
  plain.to = static_cast<char*>(to), plain.num_bytes = num_bytes;
  memcpy(plain.before, to, num_bytes);
}

}  // namespace

void complete_plain_store() {
  if (!plain.to) return;
  char made[16];
  memcpy(made, plain.to, plain.num_bytes);
  memcpy(plain.to, plain.before, plain.num_bytes);
  char* to = std::exchange(plain.to, nullptr);
  send(to, made, plain.num_bytes);
}

void reset_memory(bool weak) { is_weak = weak, under_way.clear(), regions.clear(), plain.to = nullptr; }

void order_within_warp(const void* warp) {
  for (Store& s : under_way) s.for_warp |= s.warp == warp;
}

void order_within_block(const void* warp) {
  for (Store& s : under_way) s.for_block |= s.warp == warp;
}

bool deliver_stores() {
  if (under_way.empty()) return false;
  for (uint64_t count = 1 + random_below(8); count && !under_way.empty(); --count) arrive(random_below(under_way.size()));
  return true;
}

void deliver_stores_of(const void* grid) {
  arrive_all([&](const Store& s) { return s.grid == grid; });
}

void read(const void* from, void* to, size_t num_bytes) {
  step(false);
  memcpy(to, from, num_bytes);
}

void write(void* to, const void* from, size_t num_bytes, Order order) {
  if (order == Order::kRelease) fence();
  step(true);
  if (is_elsewhere(to)) {
    send(to, from, num_bytes);
  } else {
    memcpy(to, from, num_bytes);
  }
}

void fence() {
  step(false);
  const Thread& t = *running;
  arrive_all(
      [&](const Store& s) { return s.thread == &t || (s.for_warp && s.warp == t.warp_key) || (s.for_block && s.block == t.block_key); });
}

}  // namespace cpu_gpu

using namespace cpu_gpu;

extern "C" {

// Memory full of garbage; its end is the end of a page, and nothing lies before and after it.
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
  munmap(found->second.first, found->second.second);
  allocations.erase(found);
}

// Stores of other GPUs take their time to get there, if memory is weak.
void gpu_share(int gpu, char* memory, size_t num_bytes) { regions.push_back({memory, memory + num_bytes, gpu}); }

// What a compiler calls before each load and store, with -fsanitize=thread.
void __tsan_init() {}
#define ACCESS(n)                                             \
  void __tsan_read##n(void*) { step(false); }                 \
  void __tsan_write##n(void* p) { before_plain_store(p, n); } \
  void __tsan_unaligned_read##n(void*) { step(false); }       \
  void __tsan_unaligned_write##n(void* p) { before_plain_store(p, n); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void*, size_t) { step(false); }
void __tsan_write_range(void* p, size_t num_bytes) { num_bytes <= 16 ? before_plain_store(p, num_bytes) : step(true); }
}
