// See network.h. NVSHMEM's puts are calls (common/nvshmem_calls.cuh). A relay takes descriptors from a ring that kernels fill.
#include "network.h"

#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cpu_gpu {
namespace {

constexpr int kFirstPe = 1000;  // of rank 0, so that a kernel cannot confuse ranks and PEs
constexpr uint64_t kUntilIdle = ~uint64_t(0);

struct Memory {
  char *begin, *end;
  uint64_t begins_at;

  bool holds(const char* p, size_t num_bytes) const { return p >= begin && p <= end && num_bytes <= static_cast<size_t>(end - p); }
  char* at(uint64_t offset) const { return begin + (offset - begins_at); }
};

// A part of a put: not yet read, then read and under way.
struct Piece {
  size_t begin, end;
  bool is_read;
  std::vector<char> bytes;
};

// As in deepep_rt/kernels/structs.py.
struct Descriptor {
  uint64_t from, to, word, value, num_bytes;
  int32_t rank;
  uint32_t is_awaited, sent;
  int32_t unused[2];
  uint32_t sequence;
};
static_assert(sizeof(Descriptor) == 64);

struct Put {
  int source, target;
  const char* from;
  char *to, *word;
  uint64_t value, held_until;
  std::vector<Piece> pieces;  // that have not arrived
  std::shared_ptr<size_t> num_unread;
  Descriptor* entry;  // whose `sent` the relay writes, or null
};

struct Relay {
  int allocation, rank;
  Descriptor* ring;
  uint32_t num_entries, next;
};

std::map<int, std::vector<Memory>> memories;  // by allocation and rank
std::vector<Put> in_flight;
std::vector<Relay> relays;
std::vector<uint64_t> stalled_until;   // by rank
std::vector<std::pair<int, int>> cut;  // source and target, -1 for all ranks
uint64_t num_put_bytes = 0;

bool is_cut(int source, int target) {
  return std::any_of(cut.begin(), cut.end(), [&](const std::pair<int, int>& c) {
    return (c.first == source || c.first < 0) && (c.second == target || c.second < 0);
  });
}

// Splits a put at random places, and holds some puts back.
std::shared_ptr<size_t> start(int source, int target, const char* from, char* to, size_t num_bytes, char* word, uint64_t value) {
  Put put = {source, target, from, to, word, value, 0, {}, std::make_shared<size_t>(0), nullptr};
  num_put_bytes += num_bytes;
  if (is_cut(source, target)) return put.num_unread;
  for (size_t begin = 0; begin < num_bytes;) {
    const size_t end = random_below(2) ? num_bytes : begin + 1 + random_below(num_bytes - begin);
    put.pieces.push_back({begin, end, false, {}});
    begin = end;
  }
  *put.num_unread = put.pieces.size();
  if (random_below(2)) put.held_until = random_below(16) ? current_turn() + random_below(1u << (4 + random_below(10))) : kUntilIdle;
  in_flight.push_back(std::move(put));
  return in_flight.back().num_unread;
}

bool is_due(const Put& put, uint64_t turn) {
  return put.held_until <= turn && stalled_until[put.source] <= turn && stalled_until[put.target] <= turn;
}

void advance(size_t i) {
  Put& put = in_flight[i];
  if (put.pieces.empty()) {
    memcpy(put.word, &put.value, sizeof put.value);
    std::swap(in_flight[i], in_flight.back());
    in_flight.pop_back();
    return;
  }
  const size_t which = random_below(put.pieces.size());
  Piece& piece = put.pieces[which];
  const size_t num_bytes = piece.end - piece.begin;
  if (!piece.is_read) {
    piece.bytes.assign(put.from + piece.begin, put.from + piece.end);
    piece.is_read = true;
    if (--*put.num_unread == 0 && put.entry) put.entry->sent = put.entry->sequence;
    if (random_below(2)) return;
  }
  memcpy(put.to + piece.begin, piece.bytes.data(), num_bytes);
  put.pieces.erase(put.pieces.begin() + which);
}

// The number of the descriptor that a relay finds where the next one should be. Numbers wrap around, as those of the kernels do.
uint32_t found_by(const Relay& relay) { return relay.ring[relay.next % relay.num_entries].sequence - 1; }

void take(Relay& relay) {
  Descriptor& entry = relay.ring[relay.next % relay.num_entries];
  const Descriptor d = entry;
  const std::string who = "the relay of rank " + std::to_string(relay.rank);
  const std::vector<Memory>& all = memories[relay.allocation];
  if (d.rank < 0 || d.rank >= static_cast<int>(all.size()) || d.rank == relay.rank)
    return stop(who + " found a descriptor for rank " + std::to_string(d.rank));
  const Memory &mine = all[relay.rank], &theirs = all[d.rank];
  if (!theirs.holds(theirs.at(d.word), 8) ||
      (d.num_bytes && !(mine.holds(mine.at(d.from), d.num_bytes) && theirs.holds(theirs.at(d.to), d.num_bytes))))
    return stop(who + " found a put that is not in network memory");
  start(relay.rank, d.rank, mine.at(d.from), theirs.at(d.to), d.num_bytes, theirs.at(d.word), d.value);
  const bool is_lost = is_cut(relay.rank, d.rank);
  if (d.is_awaited && is_lost) entry.sent = d.sequence;
  if (d.is_awaited && !is_lost) in_flight.back().entry = &entry;
  ++relay.next;
}

// The same place in the memory of another rank.
char* translated(const void* p, size_t num_bytes, int pe) {
  const int rank = pe - kFirstPe;
  for (auto& [allocation, all] : memories) {
    const Memory& mine = all[running->gpu];
    const char* place = static_cast<const char*>(p);
    if (!mine.holds(place, num_bytes)) continue;
    if (rank < 0 || rank >= static_cast<int>(all.size())) fail("NVSHMEM has no such PE");
    return all[rank].begin + (place - mine.begin);
  }
  fail("NVSHMEM got an address outside of symmetric memory");
}

}  // namespace

void reset_network(int num_ranks) {
  memories.clear(), in_flight.clear(), relays.clear(), cut.clear();
  stalled_until.assign(num_ranks, 0);
  num_put_bytes = 0;
}

bool has_network() { return !in_flight.empty() || !relays.empty(); }

bool carry(uint64_t turn) {
  if (!relays.empty()) {
    Relay& relay = relays[random_below(relays.size())];
    const uint32_t ahead = found_by(relay) - relay.next;
    if (ahead == 0) {
      take(relay);
      return true;
    }
    if (ahead % relay.num_entries == 0 && ahead < 1u << 31) stop("a kernel has overwritten a descriptor that its relay had not read");
  }
  for (int attempt = 0; attempt < 8 && !in_flight.empty(); ++attempt) {
    const size_t i = random_below(in_flight.size());
    if (!is_due(in_flight[i], turn)) continue;
    advance(i);
    return true;
  }
  return false;
}

bool network_is_idle(uint64_t turn) {
  return std::none_of(relays.begin(), relays.end(), [](const Relay& relay) { return found_by(relay) == relay.next; }) &&
         std::none_of(in_flight.begin(), in_flight.end(), [&](const Put& put) { return is_due(put, turn); });
}

void stall_network(uint64_t until) {
  if (!memories.empty()) stalled_until[random_below(stalled_until.size())] = until;
}

bool end_stalls() {
  for (uint64_t& until : stalled_until) until = 0;
  for (Put& put : in_flight) put.held_until = 0;
  return !in_flight.empty();
}

std::string describe_network() {
  std::map<std::pair<int, int>, int> counts;
  for (const Put& put : in_flight) ++counts[{put.source, put.target}];
  std::string text;
  for (auto& [way, count] : counts) {
    text +=
        std::to_string(count) + " puts from rank " + std::to_string(way.first) + " to rank " + std::to_string(way.second) + " in flight\n";
  }
  return text;
}

// Addresses are those of this GPU's symmetric memory. `waits`: until the bytes have been read.
void put_by_warp(void* to, const void* from, size_t num_bytes, uint64_t* word, uint64_t value, int pe, bool waits) {
  // Nothing orders the lanes here. The first lane reads the bytes when it comes, and the kernel has to see to it that they are there.
  std::shared_ptr<size_t> num_unread;
  if (running->lane == 0) {
    step(true);
    translated(from, num_bytes, kFirstPe);  // the source lies in symmetric memory too
    num_unread = start(running->gpu, pe - kFirstPe, static_cast<const char*>(from), translated(to, num_bytes, pe), num_bytes,
                       translated(word, 8, pe), value);
    while (waits && *num_unread) step(false);
  }
  sync_warp("a put of NVSHMEM", 0);
}

}  // namespace cpu_gpu

using namespace cpu_gpu;

extern "C" {

void nvshmem_put(void* to, const void* from, unsigned long long num_bytes, unsigned long long* word, unsigned long long value, int pe) {
  put_by_warp(to, from, num_bytes, reinterpret_cast<uint64_t*>(word), value, pe, false);
}

void nvshmem_put_and_wait(void* to, const void* from, unsigned long long num_bytes, unsigned long long* word, unsigned long long value,
                          int pe) {
  put_by_warp(to, from, num_bytes, reinterpret_cast<uint64_t*>(word), value, pe, true);
}

void nvshmem_signal(unsigned long long* word, unsigned long long value, int pe) {
  step(true);
  start(running->gpu, pe - kFirstPe, nullptr, nullptr, 0, translated(word, 8, pe), value);
}
}

namespace {

// Addresses in the memories of one `allocation` correspond, rank by rank. `begins_at`: the offset of `memory`.
void add_memory(int allocation, int rank, char* memory, size_t num_bytes, uint64_t begins_at) {
  std::vector<Memory>& all = memories[allocation];
  all.resize(stalled_until.size());
  all[rank] = {memory, memory + num_bytes, begins_at};
}

}  // namespace

extern "C" {

int gpu_first_pe() { return kFirstPe; }

void gpu_symmetric(int allocation, int rank, char* memory, size_t num_bytes) { add_memory(allocation, rank, memory, num_bytes, 0); }

// Network memory in pinned memory of the host, and the ring of the relay that carries it, from the put with the number `first_put`.
void gpu_relay(int allocation, int rank, char* memory, size_t num_bytes, uint64_t begins_at, void* ring, unsigned num_entries,
               unsigned first_put) {
  add_memory(allocation, rank, memory, num_bytes, begins_at);
  relays.push_back({allocation, rank, static_cast<Descriptor*>(ring), num_entries, first_put});
}

// Loses all later puts from a rank to a rank (-1: all ranks). Puts in flight still arrive, except `all`.
void gpu_cut(int source, int target, int all) {
  cut.emplace_back(source, target);
  if (all)
    in_flight.erase(std::remove_if(in_flight.begin(), in_flight.end(), [](const Put& put) { return is_cut(put.source, put.target); }),
                    in_flight.end());
}

uint64_t gpu_put_bytes() { return num_put_bytes; }
}
