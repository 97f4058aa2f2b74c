// Bulk copies between global and shared memory: each begins and ends at random times.
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "later.h"
#include "runtime.h"

namespace cpu_gpu {

namespace {

// Stores that a thread waits for together.
struct BulkGroup {
  int unread = 0, unwritten = 0;
};
std::map<const Thread*, std::vector<std::shared_ptr<BulkGroup>>> groups_of;  // the last group is not yet committed

// The layout of its 8 bytes. A phase ends when all threads and all expected bytes have arrived.
struct Mbarrier {
  int32_t missing_bytes;
  uint8_t missing_arrivals, num_arrivals, phase, unused;

  void end_phase_if_complete() {
    if (missing_bytes == 0 && missing_arrivals == 0) phase ^= 1, missing_arrivals = num_arrivals;
  }
};

Mbarrier& mbarrier_at(uint32_t address) { return *reinterpret_cast<Mbarrier*>(dynamic_shared_memory() + address); }

void check(const void* global, uint32_t shared, uint32_t num_bytes) {
  if ((reinterpret_cast<uint64_t>(global) | shared | num_bytes) % 16 != 0) fail("a bulk copy is not in pieces of 16 bytes");
  if (num_bytes) touch(global), touch(static_cast<const char*>(global) + num_bytes - 1);
}

}  // namespace

void forget_bulk_copies() { groups_of.clear(); }

void mbarrier_init(uint32_t barrier, int num_arrivals) {
  step(true);
  mbarrier_at(barrier) = {0, static_cast<uint8_t>(num_arrivals), static_cast<uint8_t>(num_arrivals), 0, 0};
}

void mbarrier_arrive(uint32_t barrier, uint32_t expected_bytes) {
  step(true);
  Mbarrier& b = mbarrier_at(barrier);
  b.missing_bytes += expected_bytes, --b.missing_arrivals;
  b.end_phase_if_complete();
}

bool mbarrier_is_past(uint32_t barrier, uint32_t parity) {
  step(false);
  return mbarrier_at(barrier).phase != parity;
}

void bulk_load(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier) {
  step(true);
  check(from, to, num_bytes);
  check_proxies(to, num_bytes, true);
  later([=, stage = dynamic_shared_memory() + to, b = &mbarrier_at(barrier)] {
    memcpy(stage, from, num_bytes);
    b->missing_bytes -= num_bytes;
    b->end_phase_if_complete();
  });
}

void bulk_store(void* to, uint32_t from, uint32_t num_bytes) {
  const bool at_once = random_below(2);  // before other lanes get to run
  if (!at_once) step(true);
  check(to, from, num_bytes);
  const bool has_lines = (reinterpret_cast<uint64_t>(to) | num_bytes) % 128 == 0;
  if (has_lines && from % 128 != 0) fail("a bulk store of whole lines has no lines in shared memory");
  check_proxies(from, num_bytes, false);
  if (groups_of[running].empty()) bulk_commit();
  const auto group = groups_of[running].back();
  ++group->unread, ++group->unwritten;
  const bool is_far = is_remote(to);
  auto read = [=, thread = running, stage = dynamic_shared_memory() + from] {
    const std::vector<char> held(stage, stage + num_bytes);
    --group->unread;
    later([=] {
      write_of_copy(to, held.data(), num_bytes, *thread, is_far);
      --group->unwritten;
    });
  };
  if (at_once) {
    read();
  } else {
    later(read);
  }
}

void bulk_commit() { groups_of[running].push_back(std::make_shared<BulkGroup>()); }

void bulk_wait(int num_groups, bool only_read) {
  const auto& groups = groups_of[running];
  for (int i = 0; i < static_cast<int>(groups.size()) - 1 - num_groups; ++i) {
    while (only_read ? groups[i]->unread : groups[i]->unwritten) step(false);
  }
}

}  // namespace cpu_gpu
