// Runs grids of CUDA threads on one CPU thread, in an order that a seed decides. The order may change at each access that other threads may
// notice. So many seeds show many interleavings, and the same seed always shows the same one.
//
// The scheduler gives turns to warps. In a turn, lanes run in sequence until each waits (for its warp, or at a barrier) or has used up its
// steps. At random times, a warp, a block or a GPU gets no turns for a while. Blocks start in order, when their GPU has an SM for them.
#include "runtime.h"

#include "later.h"
#include "memory.h"
#include "network.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cpu_gpu {
namespace {

constexpr size_t kStackBytes = 64 * 1024 + 320;  // adjacent stacks begin in different cache lines
constexpr size_t kStaticSharedBytes = 256 * 1024;
// If each lane makes so many steps without effect, all lanes wait for time. The second number is for lanes that never look at the clock.
constexpr int kIdleSteps = 256, kMostIdleSteps = 4096;

struct Grid;
struct Block;
struct Warp;

// The registers of a fiber, or of the scheduler. The compiler saves and restores them within a few instructions. longjmp of the C library
// first looks for cleanup handlers of the thread, which takes longer than many accesses.
struct Registers {
  void* words[5];
};

#define SAVE(registers) __builtin_setjmp((registers).words)
#define RESTORE(registers) __builtin_longjmp((registers).words, 1)

// A stack of a thread. A thread that ends leaves its stack at the start of the next thread of its machine there: to make a new context
// takes system calls.
struct Stack {
  char* memory;
  Registers registers;
  bool waits_for_thread = false;
};

struct Fiber : Thread {
  Registers registers;
  bool has_started = false;
  int steps_left = 1;
  unsigned num_proxy_fences = 0, num_looks = 0;  // looks at the clock
  Warp* warp = nullptr;
  Stack* stack = nullptr;
  const char* shared = nullptr;  // dynamic shared memory of its block
  size_t dynamic_bytes = 0;
};

struct Warp {
  Block* block;
  Fiber lanes[32];
  uint32_t ready = ~0u, exited = 0;
  int cursor = 0;  // the next lane, if it is ready
  Exchange exchange[2];
  unsigned num_syncs = 0;
  uint64_t recent_syncs[4] = {};  // hashes of kinds and values
  int num_arrived = 0;
  const char* kind = nullptr;
  uint32_t at_barrier[16] = {};
  uint32_t at_predecessor = 0;  // lanes that wait for the grid before theirs
  uint64_t frozen_until = 0;    // a turn
  int index = -1;               // in `runnable`
};

struct Barrier {
  unsigned arrived = 0, expected = 0, generation = 0;
  bool all_yes[2] = {true, true};
};

// The last accesses of threads to 16 bytes of shared memory, and how many proxy fences these threads had made by then.
struct SharedUse {
  const Fiber *reader = nullptr, *writer = nullptr;
  unsigned fences_of_reader = 0, fences_of_writer = 0;
};

struct Block {
  Grid* grid;
  std::vector<Warp> warps;
  Barrier barriers[16];
  unsigned threads_left;
  std::unique_ptr<char[]> shared;
  std::vector<SharedUse> uses;  // of dynamic shared memory
  size_t static_end;
  std::map<int, size_t> variables;
  std::unique_ptr<Stack[]> stacks;
  uint64_t frozen_until = 0;
  bool allows_successor = false;
};

struct Grid {
  int id, gpu;
  void (*kernel)(const void*);
  std::string name;
  std::vector<char> params;
  unsigned num_blocks, num_threads, next_block = 0, blocks_left;
  size_t dynamic_bytes;
  std::vector<std::unique_ptr<Block>> blocks;
  int predecessor = 0;        // the grid before it in its stream, if this one has started early
  unsigned num_allowing = 0;  // blocks that allow the next grid to start
};

struct Gpu {
  int num_sms = 1 << 20, busy = 0;
  uint64_t frozen_until = 0;
};

struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  uint64_t below(uint64_t n) { return next() % n; }
};

Random rng{1};
std::vector<std::unique_ptr<Grid>> grids;
std::vector<std::unique_ptr<Grid>> stopped;  // of processes that have ended: bulk copies on their way still use their memory
std::vector<Gpu> gpus;
std::vector<Warp*> runnable;
std::vector<int> finished;
std::vector<std::function<void()>> pending;                             // of `later`
std::map<unsigned, std::vector<std::unique_ptr<Stack[]>>> free_stacks;  // by number of threads
std::map<size_t, std::vector<std::unique_ptr<char[]>>> free_shared;     // by dynamic bytes
Registers scheduler;
Fiber* current = nullptr;
uint64_t now = 1, turn = 0, idle_steps = 0, num_effects = 0;
int next_id = 1, yields_left = 0, most_steps = 1, most_yields = 1, freeze_chance = 1, delivery_chance = 1, network_chance = 1,
    pending_chance = 2;
std::string error;
bool may_start_more = false;  // since the last turn, all blocks of a grid have allowed the next grid to start

bool may_freeze = true;  // not from a thaw on until a thread has an effect: otherwise something is frozen whenever all others wait

void note_progress() { ++num_effects, idle_steps = 0, may_freeze = true; }

void add_runnable(Warp& w) {
  if (w.index >= 0) return;
  w.index = runnable.size();
  runnable.push_back(&w);
}

void remove_runnable(Warp& w) {
  runnable.back()->index = w.index;
  runnable[w.index] = runnable.back();
  runnable.pop_back();
  w.index = -1;
}

[[noreturn]] __attribute__((noinline)) void to_scheduler() { RESTORE(scheduler); }

// Returns when another thread begins on this stack.
__attribute__((noinline)) void await_next_thread(Stack& stack) {
  stack.waits_for_thread = true;
  if (SAVE(stack.registers)) return;
  to_scheduler();
}

void run_fibers() {
  for (;;) {
    const Grid& grid = *current->warp->block->grid;
    grid.kernel(grid.params.data());
    Warp& w = *current->warp;
    complete_plain_store();
    const uint32_t bit = 1u << current->lane;
    w.ready &= ~bit, w.exited |= bit;
    --w.block->threads_left;
    note_progress();
    await_next_thread(*current->stack);
  }
}

__attribute__((noinline)) void resume(Fiber& f) {
  current = &f, running = &f;
  if (f.has_started) RESTORE(f.registers);
  f.has_started = true;
  if (std::exchange(f.stack->waits_for_thread, false)) RESTORE(f.stack->registers);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = f.stack->memory;
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, run_fibers, 0);
  setcontext(&context);
}

Fiber& next_lane(Warp& w) {
  const uint32_t later = w.ready & ~0u << w.cursor;
  const int lane = __builtin_ctz(later ? later : w.ready);
  w.cursor = (lane + 1) % 32;
  return w.lanes[lane];
}

// Continues with another lane of the warp, or with the scheduler.
__attribute__((noinline)) void yield(bool turn_ends) {
  Fiber& f = *current;
  if (SAVE(f.registers)) return;
  if (turn_ends || !f.warp->ready) to_scheduler();
  resume(next_lane(*f.warp));
}

__attribute__((noinline)) void run(Warp& w) {
  if (!SAVE(scheduler)) resume(next_lane(w));
  current = nullptr, running = nullptr;
}

void start_block(Grid& grid) {
  auto block = std::make_unique<Block>();
  block->grid = &grid;
  block->warps = std::vector<Warp>(grid.num_threads / 32);
  block->threads_left = grid.num_threads;
  block->static_end = (grid.dynamic_bytes + 127) / 128 * 128;
  auto& shared = free_shared[grid.dynamic_bytes];
  if (shared.empty()) shared.emplace_back(new char[block->static_end + kStaticSharedBytes]);
  block->shared = std::move(shared.back());
  shared.pop_back();
  memset(block->shared.get(), kGarbage, block->static_end);
  auto& stacks = free_stacks[grid.num_threads];
  if (stacks.empty()) {
    void* memory =
        mmap(nullptr, grid.num_threads * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks.emplace_back(new Stack[grid.num_threads]);
    for (unsigned t = 0; t < grid.num_threads; ++t) stacks.back()[t].memory = static_cast<char*>(memory) + t * kStackBytes;
  }
  block->stacks = std::move(stacks.back());
  stacks.pop_back();
  for (unsigned t = 0; t < grid.num_threads; ++t) {
    Warp& w = block->warps[t / 32];
    Fiber& f = w.lanes[t % 32];
    w.block = block.get();
    f.thread_idx.x = t, f.block_idx.x = grid.next_block, f.block_dim.x = grid.num_threads, f.grid_dim.x = grid.num_blocks;
    f.lane = t % 32, f.gpu = grid.gpu, f.warp_key = &w, f.block_key = block.get(), f.grid_key = &grid, f.warp = &w,
    f.stack = &block->stacks[t], f.shared = block->shared.get(), f.dynamic_bytes = grid.dynamic_bytes;
  }
  for (Warp& w : block->warps) add_runnable(w);
  ++grid.next_block;
  ++gpus[grid.gpu].busy;
  grid.blocks.push_back(std::move(block));
  note_progress();
}

void start_blocks() {
  for (auto& grid : grids) {
    while (grid->next_block < grid->num_blocks && gpus[grid->gpu].busy < gpus[grid->gpu].num_sms) start_block(*grid);
  }
}

void allow_successor(Block& block) {
  if (block.allows_successor) return;
  block.allows_successor = true;
  may_start_more |= ++block.grid->num_allowing == block.grid->num_blocks;
}

void end_block(Block& block) {
  Grid& grid = *block.grid;
  allow_successor(block);
  free_stacks[grid.num_threads].push_back(std::move(block.stacks));
  free_shared[grid.dynamic_bytes].push_back(std::move(block.shared));
  --gpus[grid.gpu].busy;
  for (auto& held : grid.blocks) {
    if (held.get() == &block) std::swap(held, grid.blocks.back());
  }
  grid.blocks.pop_back();
  if (--grid.blocks_left > 0) return;
  deliver_stores_of(&grid);
  finished.push_back(grid.id);
  for (auto& next : grids) {
    if (next->predecessor != grid.id) continue;
    for (auto& waiting : next->blocks) {
      for (Warp& w : waiting->warps) {
        if (!w.at_predecessor) continue;
        w.ready |= w.at_predecessor, w.at_predecessor = 0;
        add_runnable(w);
      }
    }
  }
  for (auto& held : grids) {
    if (held.get() == &grid) std::swap(held, grids.back());
  }
  grids.pop_back();
}

void give_turn(Warp& w) {
  w.cursor = rng.below(32);
  yields_left = 1 + rng.below(most_yields);
  run(w);
  if (w.ready) return;
  remove_runnable(w);
  if (w.exited == ~0u && w.block->threads_left == 0) end_block(*w.block);
}

bool is_frozen(const Warp& w) { return std::max({w.frozen_until, w.block->frozen_until, gpus[w.block->grid->gpu].frozen_until}) > turn; }

// Stops something for some turns, or until nothing else can go on. Long stops let other threads advance far.
void freeze_something() {
  Warp& w = *runnable[rng.below(runnable.size())];
  const uint64_t until = rng.below(4) ? turn + rng.below(1u << (4 + rng.below(10))) : ~uint64_t(0);
  switch (rng.below(has_network() ? 4 : 3)) {
    case 0:
      w.frozen_until = until;
      break;
    case 1:
      w.block->frozen_until = until;
      break;
    case 2:
      gpus[w.block->grid->gpu].frozen_until = until;
      break;
    default:
      stall_network(until);
  }
}

// Returns whether something was frozen.
bool thaw() {
  may_freeze = false;
  bool was_frozen = end_stalls();
  for (Warp* w : runnable) {
    was_frozen |= is_frozen(*w);
    w->frozen_until = w->block->frozen_until = gpus[w->block->grid->gpu].frozen_until = 0;
  }
  return was_frozen;
}

Warp& choose() {
  if (freeze_chance && may_freeze && rng.below(freeze_chance) == 0) freeze_something();
  for (int attempt = 0; attempt < 64; ++attempt) {
    Warp& w = *runnable[rng.below(runnable.size())];
    if (!is_frozen(w)) return w;
  }
  thaw();
  return *runnable[rng.below(runnable.size())];
}

// Gives many steps to each lane that can run, so that it looks at the clock if it ever does. If no step has an effect, all lanes wait for
// time, and this returns true. Lanes that meet again and again share the steps.
bool all_wait() {
  const std::vector<Warp*> warps = runnable;
  const int steps = most_steps, yields = most_yields;
  most_steps = kIdleSteps, most_yields = 1 << 20;
  idle_steps = 0;
  bool waits = true;
  for (Warp* w : warps) {
    for (uint32_t left = w->ready; left && waits; left &= left - 1) {
      if (!(w->ready & left & -left)) continue;  // it has met the others meanwhile
      Fiber& f = w->lanes[__builtin_ctz(left)];
      f.steps_left = kIdleSteps;
      const uint64_t begin = idle_steps, effects = num_effects;
      const unsigned looks = f.num_looks;
      Fiber* next = &f;
      do {
        yields_left = 0;
        if (!SAVE(scheduler)) resume(*next);
        current = nullptr, running = nullptr;
        waits = error.empty() && num_effects == effects && w->ready;
        if (waits) next = &next_lane(*w);
      } while (waits && idle_steps < begin + (f.num_looks == looks ? kMostIdleSteps : kIdleSteps));
    }
    if (!waits) {
      if (!w->ready && w->index >= 0) {
        remove_runnable(*w);
        if (w->exited == ~0u && w->block->threads_left == 0) end_block(*w->block);
      }
      break;
    }
  }
  most_steps = steps, most_yields = yields;
  return waits;
}

void do_pending() {
  std::swap(pending[rng.below(pending.size())], pending.back());
  const std::function<void()> work = std::move(pending.back());
  pending.pop_back();
  work();
  note_progress();
}

void carry_some() {
  for (uint64_t count = 1 + rng.below(8); count && carry(turn); --count) note_progress();
}

std::string describe() {
  std::string text = describe_network();
  char line[256];
  for (auto& grid : grids) {
    snprintf(line, sizeof line, "GPU %d, %s: %u of %u blocks not started", grid->gpu, grid->name.c_str(),
             grid->num_blocks - grid->next_block, grid->num_blocks);
    text += line;
    for (auto& block : grid->blocks) {
      int ready = 0, exited = 0;
      std::map<std::string, int> waiting;
      for (Warp& w : block->warps) {
        ready += __builtin_popcount(w.ready), exited += __builtin_popcount(w.exited);
        for (int b = 0; b < 16; ++b) {
          if (w.at_barrier[b]) waiting["barrier " + std::to_string(b)] += __builtin_popcount(w.at_barrier[b]);
        }
        if (w.num_arrived) waiting[w.kind] += w.num_arrived;
        if (w.at_predecessor) waiting["griddepcontrol.wait"] += __builtin_popcount(w.at_predecessor);
      }
      snprintf(line, sizeof line, "; block %u: %d threads run, %d have ended", block->warps[0].lanes[0].block_idx.x, ready, exited);
      text += line;
      for (auto& [place, count] : waiting) text += ", " + std::to_string(count) + " wait at " + place;
    }
    text += "\n";
  }
  return text;
}

void on_bad_address(int, siginfo_t* info, void*) {
  char text[80];
  snprintf(text, sizeof text, "a thread used address %p, which is in no memory of a GPU", info->si_addr);
  if (current) fail(text);
  signal(SIGSEGV, SIG_DFL);
}

// While this object lives, a bad address ends the run and not the process.
struct CatchBadAddresses {
  struct sigaction mine = {}, before;
  CatchBadAddresses() {
    static char stack[64 * 1024];
    const stack_t alternative = {stack, 0, sizeof stack};
    sigaltstack(&alternative, nullptr);
    mine.sa_sigaction = on_bad_address;
    mine.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &mine, &before);
  }
  ~CatchBadAddresses() { sigaction(SIGSEGV, &before, nullptr); }
};

}  // namespace

Thread* running = nullptr;

void stop(const std::string& text) {
  if (error.empty()) error = text + "\n" + describe();
}

void fail(const char* text) {
  const Fiber& f = *current;
  stop(std::string(text) + ", in " + f.warp->block->grid->name + " on GPU " + std::to_string(f.warp->block->grid->gpu) + ", block " +
       std::to_string(f.block_idx.x) + ", thread " + std::to_string(f.thread_idx.x));
  RESTORE(scheduler);
}

uint64_t random_below(uint64_t end) { return rng.below(end); }

void step(bool wrote) {
  complete_plain_store();
  ++now, ++idle_steps;
  if (wrote) note_progress();
  Fiber& f = *current;
  if (--f.steps_left > 0) return;
  f.steps_left = 1 + rng.below(most_steps);
  yield(--yields_left < 0);
}

bool is_running(int id) {
  return std::any_of(grids.begin(), grids.end(), [&](auto& grid) { return grid->id == id; });
}

void launch_dependents() {
  step(true);
  allow_successor(*current->warp->block);
}

void wait_for_predecessor() {
  step(false);
  Warp& w = *current->warp;
  const int id = w.block->grid->predecessor;
  if (!id || !is_running(id)) return;
  w.ready &= ~(1u << current->lane), w.at_predecessor |= 1u << current->lane;
  yield(false);
}

void later(std::function<void()> work) { pending.push_back(std::move(work)); }

// Whether the warp has just exchanged the same values.
bool repeats(Warp& w, const Exchange& exchange) {
  uint64_t hash = reinterpret_cast<uintptr_t>(w.kind);
  for (uint64_t value : exchange.values) hash = Random{hash ^ value}.next();
  const bool was_seen = std::find(std::begin(w.recent_syncs), std::end(w.recent_syncs), hash) != std::end(w.recent_syncs);
  w.recent_syncs[w.num_syncs % 4] = hash;
  return was_seen;
}

const Exchange& sync_warp(const char* kind, uint64_t value) {
  complete_plain_store();
  Fiber& f = *current;
  Warp& w = *f.warp;
  Exchange& exchange = w.exchange[w.num_syncs % 2];
  if (w.num_arrived == 0) w.kind = kind, exchange.votes = 0;
  if (strcmp(w.kind, kind) != 0) fail((std::string("lanes of a warp are in ") + w.kind + " and in " + kind).c_str());
  exchange.values[f.lane] = value;
  exchange.votes |= static_cast<uint32_t>(value != 0) << f.lane;
  if (++w.num_arrived == 32) {
    w.num_arrived = 0, ++w.num_syncs;
    if (strcmp(kind, "__syncwarp") == 0) order_within_warp(&w);
    w.ready = ~0u;
    if (!repeats(w, exchange)) note_progress();  // a warp that polls together has no effect
  } else {
    w.ready &= ~(1u << f.lane);
    yield(false);
  }
  return exchange;
}

bool sync_block(int number, unsigned num_threads, bool yes) {
  complete_plain_store();
  Fiber& f = *current;
  Warp& w = *f.warp;
  Block& block = *w.block;
  if (number < 0 || number > 15) fail("a block has barriers 0 to 15");
  Barrier& barrier = block.barriers[number];
  const unsigned expected = num_threads ? num_threads : block.grid->num_threads;
  if (barrier.arrived == 0) barrier.expected = expected, barrier.all_yes[barrier.generation % 2] = true;
  if (barrier.expected != expected) fail("threads expect different numbers of threads at one barrier");
  bool& all_yes = barrier.all_yes[barrier.generation % 2];
  all_yes &= yes;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0, ++barrier.generation;
    order_within_block(&w);
    for (Warp& other : block.warps) {
      if (!other.at_barrier[number]) continue;
      order_within_block(&other);
      other.ready |= other.at_barrier[number], other.at_barrier[number] = 0;
      add_runnable(other);
    }
    note_progress();
  } else {
    w.ready &= ~(1u << f.lane), w.at_barrier[number] |= 1u << f.lane;
    yield(false);
  }
  return all_yes;
}

void* shared_memory(int id, size_t num_bytes, size_t alignment) {
  Block& block = *current->warp->block;
  auto found = block.variables.find(id);
  if (found == block.variables.end()) {
    const size_t start = (block.static_end + alignment - 1) / alignment * alignment;
    block.static_end = start + num_bytes;
    if (block.static_end > (block.grid->dynamic_bytes + 127) / 128 * 128 + kStaticSharedBytes) fail("too much shared memory");
    memset(block.shared.get() + start, kGarbage, num_bytes);
    found = block.variables.emplace(id, start).first;
  }
  return block.shared.get() + found->second;
}

char* dynamic_shared_memory() { return current->warp->block->shared.get(); }

void note_shared_access(const void* p, size_t num_bytes, bool writes) {
  const size_t dynamic_bytes = current->dynamic_bytes, first = static_cast<const char*>(p) - current->shared;
  if (first >= dynamic_bytes) return;  // also if `p` lies before it
  Block& block = *current->warp->block;
  if (block.uses.empty()) block.uses.resize(dynamic_bytes / 16 + 1);
  for (size_t i = first / 16; i <= (first + num_bytes - 1) / 16 && i < block.uses.size(); ++i) {
    SharedUse& use = block.uses[i];
    if (writes) {
      use.writer = current, use.fences_of_writer = current->num_proxy_fences;
    } else {
      use.reader = current, use.fences_of_reader = current->num_proxy_fences;
    }
  }
}

void fence_proxies() { ++current->num_proxy_fences; }

void check_proxies(uint32_t shared, uint32_t num_bytes, bool copy_writes) {
  Block& block = *current->warp->block;
  for (size_t i = shared / 16; i < (shared + num_bytes) / 16 && i < block.uses.size(); ++i) {
    SharedUse& use = block.uses[i];
    if (use.writer && use.writer->num_proxy_fences == use.fences_of_writer) fail("a bulk copy follows a store without a proxy fence");
    if (!copy_writes) continue;
    if (use.reader && use.reader->num_proxy_fences == use.fences_of_reader) fail("a bulk copy follows a load without a proxy fence");
    use = {};
  }
}

uint64_t clock_ns() {
  step(false);
  ++current->num_looks;
  return now;
}

uint64_t current_turn() { return turn; }

bool is_on_own_stack(const void* p) { return p >= current->stack->memory && p < current->stack->memory + kStackBytes; }

}  // namespace cpu_gpu

// --- the interface for Python
// --------------------------------------------------------------------------------------------------------------

using namespace cpu_gpu;

extern "C" {

// Drops all grids. `seed` decides the order from here on, and how often it changes. `is_weak`: see memory.cpp.
void gpu_reset(uint64_t seed, int num_gpus, int is_weak) {
  reset_memory(is_weak);
  rng.state = seed;
  for (auto* held : {&grids, &stopped}) {
    for (auto& grid : *held) {
      for (auto& block : grid->blocks) free_stacks[grid->num_threads].push_back(std::move(block->stacks));
    }
    held->clear();
  }
  // Each machine makes its contexts anew: a kernel of an earlier one may have stored to a stack that no thread used.
  for (auto& [num_threads, all] : free_stacks) {
    for (auto& stacks : all) {
      for (unsigned t = 0; t < num_threads; ++t) stacks[t].waits_for_thread = false;
    }
  }
  forget_bulk_copies();
  runnable.clear(), finished.clear(), pending.clear(), error.clear();
  gpus.assign(num_gpus, Gpu());
  now = 1 + rng.below(1u << 30), turn = 0, idle_steps = 0;
  most_steps = 1 << rng.below(8), most_yields = 1 << rng.below(8);
  delivery_chance = 1 << rng.below(8);
  pending_chance = 2 << rng.below(7);
  freeze_chance = rng.below(4) ? 1 << (2 + rng.below(8)) : 0;
  network_chance = 1 << Random{~seed}.below(8);
  reset_network(num_gpus);
}

void gpu_set_sms(int gpu, int num_sms) { gpus[gpu].num_sms = num_sms; }

int gpu_start(int gpu, const char* name, void (*kernel)(const void*), const void* params, size_t num_bytes, unsigned num_blocks,
              unsigned num_threads, size_t dynamic_bytes, int predecessor) {
  auto grid = std::make_unique<Grid>();
  grid->id = next_id++, grid->predecessor = predecessor, grid->gpu = gpu, grid->kernel = kernel, grid->name = name;
  grid->params.assign(static_cast<const char*>(params), static_cast<const char*>(params) + num_bytes);
  grid->num_blocks = grid->blocks_left = num_blocks, grid->num_threads = num_threads, grid->dynamic_bytes = dynamic_bytes;
  grids.push_back(std::move(grid));
  return grids.back()->id;
}

// Stops the kernels of a GPU wherever they are, as the end of its process does. What they have stored still arrives.
void gpu_stop(int gpu) {
  for (size_t i = 0; i < grids.size();) {
    if (grids[i]->gpu != gpu) {
      ++i;
      continue;
    }
    for (auto& block : grids[i]->blocks) {
      for (Warp& w : block->warps) {
        if (w.index >= 0) remove_runnable(w);
      }
      --gpus[gpu].busy;
    }
    stopped.push_back(std::move(grids[i]));
    std::swap(grids[i], grids.back());
    grids.pop_back();
  }
}

// Whether all blocks of a grid allow the next one to start, or have ended.
int gpu_allows_successor(int id) {
  return std::none_of(grids.begin(), grids.end(), [&](auto& grid) { return grid->id == id && grid->num_allowing < grid->num_blocks; });
}

// Runs for some turns. Returns 0: they are used up; 1: a grid has ended (gpu_finished); 2: all threads wait for time; 3: an error
// (gpu_error); 4: there is no grid.
int gpu_advance(long num_turns) {
  const CatchBadAddresses guard;
  for (; num_turns > 0; --num_turns, ++turn) {
    if (!error.empty()) return 3;
    if (!finished.empty()) return 1;
    if (grids.empty()) return 4;
    if (std::exchange(may_start_more, false)) return 0;
    start_blocks();
    const bool all_may_wait = idle_steps > 4096 && idle_steps > 64 * 32 * runnable.size();
    if (!pending.empty() && (all_may_wait || runnable.empty() || rng.below(pending_chance) == 0)) do_pending();
    if ((all_may_wait || rng.below(delivery_chance) == 0) && deliver_stores()) note_progress();
    if (has_network() && (all_may_wait || rng.below(network_chance) == 0)) carry_some();
    if (runnable.empty() && !pending.empty()) continue;
    if (runnable.empty()) {
      stop("no thread can run");
      return 3;
    }
    // A network often waits for nothing but the end of its stalls.
    if (has_network() && idle_steps > 16 * 32 * runnable.size() && network_is_idle(turn) && thaw()) idle_steps = 0;
    // A thread may have waited for what has just arrived: then the clock does not pass.
    if (pending.empty() && all_may_wait && idle_steps > 0 && network_is_idle(turn)) {
      if (thaw())
        idle_steps = 0;
      else if (all_wait())
        return 2;
    }
    give_turn(choose());
  }
  return !error.empty() ? 3 : !finished.empty() ? 1 : 0;
}

int gpu_finished() {
  const int id = finished.back();
  finished.pop_back();
  return id;
}

const char* gpu_error() { return error.c_str(); }

const char* gpu_describe() {
  static std::string text;
  text = describe();
  return text.c_str();
}

void gpu_pass_time(uint64_t ns) { now += ns, idle_steps = uint64_t(1) << 40; }
}
