// The emulated machine: threads, warps, warpgroups, the block that runs, and the asynchronous work under way.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "emu.h"
#include "sanitize.h"

namespace emu {

constexpr uint32_t kReservedBytes = 1024;     // the system's part at the start of shared memory
constexpr uint32_t kMaxSharedBytes = 232448;  // 227 KiB, dynamic and static together
constexpr uint32_t kMaxStaticBytes = 48 << 10;
constexpr int kPhases = 8;  // tokens kept per barrier, by phase

struct Cta;

struct WarpOp {
  WarpOpKind kind;
  uint32_t mask, arrived = 0;
  const char* what;
  char* token;
  Operand in[32];
};
struct Warp {
  Fiber* lane[32] = {};
  uint32_t registers = 0;
  bool slow = false;                         // runs less often than the others
  std::vector<std::unique_ptr<WarpOp>> ops;  // waiting for lanes
  uint32_t num_ops = 0;
  char tokens[16] = {};
};

struct Mbarrier {
  uint32_t count;             // arrivals a phase needs
  int64_t pending, tx_bytes;  // still missing in this phase
  uint64_t phase = 0;
  std::vector<Fiber*> waiting;
  Fiber* initialiser = nullptr;
  bool published = false;  // to the asynchronous proxy, by fence.mbarrier_init
  char tokens[kPhases] = {};
};
struct NamedBarrier {
  int expected = 0, arrived = 0;
  uint32_t arrived_lanes[32] = {};  // by warp
  uint32_t generation = 0;
  std::vector<Fiber*> waiting;
  char tokens[kPhases] = {};
};

struct CpAsync {
  enum Kind { copy, arrive, commit } kind;
  uint32_t dst = 0;  // or the mbarrier
  const void* src = nullptr;
  int chunk = 0, bytes = 0;
};
// What encode_tiled leaves in a CUtensorMap.
struct TensorMap {
  uint64_t magic;
  char* base;
  uint64_t dims[5], strides[4];
  uint16_t box[5];
  uint8_t rank, element_bytes, swizzle, type;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
struct TmaCopy {
  TensorMap map{};
  int coordinates[5] = {};
  uint32_t shared = 0, bar = 0;
  bool add = false;     // a store that adds
  bool commit = false;  // marks the end of a bulk group instead
  Cta* cta = nullptr;
  Fiber* issuer = nullptr;
};

// The accumulator of unfinished wgmmas: the threads' registers hold NaN until the group is done.
struct Accumulator {
  float* registers[128] = {};
  int n, users = 0;
  float value[64 * 256];
};
struct Wgmma {
  WgmmaShape shape;
  uint64_t a, b;
  int num_threads = 0;
  uint64_t fence = ~0ull;  // the oldest proxy fence of the issuing threads
  Accumulator* accumulator = nullptr;
  uint32_t first_byte[2] = {~0u, ~0u}, end_byte[2] = {0, 0};  // of operands a and b in shared memory
};
struct Warpgroup {
  Cta* cta;
  int index;
  std::deque<Wgmma> ops;
  uint64_t first_op = 0, groups_done = 0;
  std::vector<uint64_t> group_end;
  std::vector<int> group_threads;
  std::vector<std::unique_ptr<Accumulator>> accumulators;
  std::vector<Fiber*> waiting;
  char issued = 0, landed = 0;
};

enum class Wait { ready, done, mbarrier, barrier, warp, wgmma, cp_async, bulk, registers };

struct Fiber : Thread {
  Cta* cta;
  Warp* warp;
  Warpgroup* warpgroup;
  uint32_t index, lane;
  void* stack_pointer = nullptr;
  char* stack = nullptr;

  Wait wait = Wait::ready;
  uint64_t wait_a = 0, wait_b = 0;  // what for: a barrier, a count, a parity
  WarpOp* warp_op = nullptr;
  Operand result;

  std::deque<CpAsync> copies;
  uint64_t copies_committed = 0, copies_done = 0;
  int copies_in_flight = 0;
  bool copies_queued = false;
  std::deque<TmaCopy> stores;
  uint64_t stores_committed = 0, stores_done = 0;
  bool stores_queued = false;

  uint64_t wgmma_next = 0, wgmma_commits = 0;
  bool wgmma_fenced = false;
  uint64_t proxy_fence = 0;  // time of the last fence.proxy.async
  uint64_t ordered = 0;      // time of the last barrier or wait that orders it after other lanes

  void* asan_fake_stack = nullptr;
  void* tsan_fiber = nullptr;
  int tsan_depth = 0;
  char issued = 0, landed = 0;
};

// What the emulator knows of each 16-byte chunk of shared memory.
struct Chunk {
  uint8_t copies_in_flight = 0, stores_reading = 0;
  uint64_t written = 0;  // time of the last write through the generic proxy that the emulator saw
  Fiber* writer = nullptr;
  bool copied = false;  // that write was a cp.async, which its consumers fence
  uint64_t read = 0;    // and of the last such read
  Fiber* reader = nullptr;
};
struct Cta {
  uint3 block_idx;
  int live_threads;
  uint32_t dynamic_offset, end;  // the allocation: [dynamic_offset, end)
  uint32_t capacity, static_bytes = 0;
  std::unique_ptr<char, void (*)(void*)> shared{nullptr, free};
  std::vector<Chunk> chunks;
  std::map<const void*, uint32_t> statics;
  std::map<uint32_t, std::string> labels;

  std::vector<Fiber*> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  NamedBarrier barriers[16];
  std::unordered_map<uint32_t, Mbarrier> mbarriers;
  int64_t free_registers = 0;
  uint64_t proxy_fence = 0;  // of any thread
  std::vector<Fiber*> waiting_for_registers;
  void* tsan_fiber = nullptr;
};

// Asynchronous work that may land at any moment.
struct Work {
  enum Kind { cp_async, tma_load, bulk_store, wgmma_group } kind;
  Fiber* fiber = nullptr;
  Warpgroup* warpgroup = nullptr;
  std::shared_ptr<TmaCopy> tma;
};

struct Machine {
  std::unique_ptr<Cta> cta;  // blocks run one after another: nothing in cuda/ waits for another block
  std::deque<Fiber*> ready;
  std::vector<Work> pool;
  uint64_t clock = 0, random_state = 1;
  bool in_fiber = false, landing = false, failed = false;
  std::string error;
  void* landing_tsan_fiber = nullptr;
};
extern Machine machine;

inline Fiber* self() { return static_cast<Fiber*>(current); }
uint64_t random_number();

// ---- scheduler.cpp
void block(Wait, uint64_t a = 0, uint64_t b = 0);  // gives way until woken
void wake(Fiber*);
void wake_all(std::vector<Fiber*>&);
void maybe_preempt();
[[noreturn]] void leave_failed_thread();
inline uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// ---- shared.cpp
struct Location {
  Cta* cta;
  uint32_t offset;
  char* pointer() const { return cta->shared.get() + offset; }
};
Location locate(uint32_t address, size_t bytes, size_t align);
void mark_copies(Cta*, uint32_t offset, uint32_t bytes, int delta);
void mark_stores(Cta*, uint32_t offset, uint32_t bytes, int delta);
bool copy_in_flight(Cta*, uint32_t offset, uint32_t bytes);
bool store_reading(Cta*, uint32_t offset, uint32_t bytes);
void note_generic_write(Cta*, uint32_t offset, uint32_t bytes, Fiber* writer, bool copied = false);
void note_async_write(Cta*, uint32_t offset, uint32_t bytes);
void note_generic_read(Cta*, uint32_t offset, uint32_t bytes, Fiber* reader);
bool written_without_fence(Cta*, uint32_t offset, uint64_t reader_fence);
void check_lane_order(const Location&, bool write, Fiber* who, const char* what, bool whole = true);
bool used_without_fence(Cta*, uint32_t offset, uint64_t overwriter_fence);  // written or read
void check_async_destination(Cta*, uint32_t offset, uint32_t bytes, const char* who);
uint32_t swizzle(uint32_t address, uint32_t span);

// ---- sync.cpp
Mbarrier& mbarrier_at(Location);
void check_published(Location, const char* who);
void arrive(Location, uint32_t expect_tx);
void complete_tx(Location, uint32_t bytes);
void finish_barrier(Cta*, int id);

// ---- async.cpp, tma.cpp, wgmma.cpp
void submit(Work);
void land(size_t index);
void land_tma_load(TmaCopy&);
void land_bulk_stores(Fiber*);
void land_wgmma_group(Warpgroup*);
float element_to_float(uint16_t bits, bool f16);

// ---- diagnostics.cpp
std::string place(Cta*, uint32_t offset);
std::string report(const char* head);
void check_thread_exit(Fiber*);
void check_block_exit(Cta*);

}  // namespace emu
