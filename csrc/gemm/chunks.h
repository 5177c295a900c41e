// The rows of each expert, cut into pieces of work, and the memory that a piece needs. An operator calls
// make_chunks() for a bound on bytes, then for_each_chunk(), whose body computes all products of one chunk.
#pragma once

#include <memory>
#include <vector>

#include "checks.h"
#include "huge_pages.h"
#include "parallel.h"

namespace fmoe_ext::gemm {

// Rows of one expert: all, or a part of an expert with many.
struct Segment {
  int64_t expert, begin, end;  // rows [begin, end) of the expert-major order
  bool cut;                    // the expert has rows in other segments too
  int64_t rows() const { return end - begin; }
};

// Segments that share one workspace.
struct Chunk {
  int64_t begin, end;
  std::vector<Segment> segments;  // consecutive, never empty
  int64_t rows() const { return end - begin; }
};

inline const char* bytes_of(const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); }
inline char* mutable_bytes_of(const Tensor& t) { return static_cast<char*>(t.mutable_data_ptr()); }

inline void zero_rows_from(const Tensor& rows, int64_t begin) {
  const int64_t row_bytes = rows.size(1) * rows.element_size();
  std::fill_n(mutable_bytes_of(rows) + begin * row_bytes, (rows.size(0) - begin) * row_bytes, 0);
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// offs [E] checked against num_rows, as 64-bit numbers with a leading zero.
inline std::vector<int64_t> read_offs(const Tensor& offs, int64_t num_rows) {
  std::vector<int64_t> bounds(offs.numel() + 1, 0);
  const auto* ends = static_cast<const int32_t*>(offs.const_data_ptr());
  for (int64_t e = 0; e < offs.numel(); ++e) {
    STD_TORCH_CHECK(ends[e] >= bounds[e], "offs must not decrease or be negative, but offs[", e, "] is ",
                    ends[e], " after ", bounds[e]);
    STD_TORCH_CHECK(ends[e] <= num_rows, "offs must not exceed the number of rows ", num_rows, ", but offs[",
                    e, "] is ", ends[e]);
    bounds[e + 1] = ends[e];
  }
  return bounds;
}

// What a call computes chunk by chunk: `apart`, whole small experts that one thread takes through all of
// their products while they are in the cache of its core, and `together`, of which all threads take jobs.
struct Chunks {
  std::vector<Chunk> apart, together;
};

constexpr int64_t kCoreBytes = 512 << 10;  // of rows that stay in a core's cache, beside an expert's weights

struct ChunkLimits {
  int64_t rows;            // about, of a chunk: an expert with far more is cut into equal parts
  int64_t rows_apart = 0;  // the same of a chunk for one thread
};

inline void append(std::vector<Chunk>& chunks, const Segment& segment, int64_t max_rows) {
  const bool goes_on = !chunks.empty() && !segment.cut && !chunks.back().segments.back().cut &&
                       chunks.back().end == segment.begin &&
                       chunks.back().rows() + segment.rows() <= max_rows;
  if (!goes_on) chunks.push_back({segment.begin, segment.begin, {}});
  chunks.back().segments.push_back(segment);
  chunks.back().end = segment.end;
}

// Where experts are cut depends on limits.rows alone, and results on nothing else here.
inline Chunks make_chunks(const std::vector<int64_t>& bounds, const ChunkLimits& limits) {
  Chunks chunks;
  for (size_t e = 0; e + 1 < bounds.size(); ++e) {
    const int64_t expert = static_cast<int64_t>(e), rows = bounds[e + 1] - bounds[e];
    if (rows == 0) continue;
    if (rows <= 2 * limits.rows_apart) {
      append(chunks.apart, {expert, bounds[e], bounds[e + 1], false}, limits.rows_apart);
      continue;
    }
    const int64_t parts = rows <= limits.rows + limits.rows / 2 ? 1 : divide_up(rows, limits.rows);
    for (int64_t part = 0; part < parts; ++part)
      append(chunks.together,
             {expert, bounds[e] + rows * part / parts, bounds[e] + rows * (part + 1) / parts, parts > 1},
             limits.rows);
  }
  const bool too_few = static_cast<int64_t>(chunks.apart.size()) < 2 * num_threads();
  return too_few && num_threads() > 1 && limits.rows_apart > 0 ? make_chunks(bounds, {limits.rows}) : chunks;
}

// As many rows as fit, but enough of them to be worth a chunk.
inline int64_t rows_within(int64_t bytes, int64_t row_bytes) {
  return std::max<int64_t>(bytes / std::max<int64_t>(row_bytes, 1), 64);  // rows may have no columns
}

// Limits for rows of row_bytes in a workspace, of experts with weights of expert_bytes each; all in bytes.
inline ChunkLimits limits_within(int64_t workspace, int64_t row_bytes, int64_t expert_bytes,
                                 int64_t num_rows) {
  ChunkLimits limits{rows_within(workspace, row_bytes)};
  if (expert_bytes > kCoreBytes) return limits;
  limits.rows_apart = kCoreBytes / std::max<int64_t>(row_bytes, 1);
  if (num_threads() > 1)  // several for each thread, so that all end at about the same time
    limits.rows_apart = std::min(limits.rows_apart, divide_up(num_rows, 4 * num_threads()));
  limits.rows_apart = std::min(limits.rows_apart, limits.rows / 2);
  return limits;
}

// Memory for the whole of one call, at a multiple of 64 bytes.
class Workspace {
 public:
  Workspace(const Tensor& like, int64_t bytes)
      : bytes_(new_reused(like, {divide_up(checked_sum(bytes, kAlign), like.element_size())})),
        data_(reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(bytes_.mutable_data_ptr()) + kAlign - 1) /
                                      kAlign * kAlign)) {}
  char* data() const { return data_; }

 private:
  static constexpr int64_t kAlign = 64;
  Tensor bytes_;
  char* data_;
};

// Calls body(chunk, memory) for every chunk, with as many bytes of memory as bytes(chunk).
template <class Bytes, class Body>
void for_each_chunk(const Chunks& chunks, const Tensor& like, const Bytes& bytes, const Body& body) {
  const auto largest = [&](const std::vector<Chunk>& list) {
    int64_t result = 0;
    for (const Chunk& chunk : list) result = std::max(result, bytes(chunk));
    return divide_up(result, 64) * 64;
  };
  const int64_t num_apart = chunks.apart.size(), workers = std::min(num_threads(), num_apart);
  const int64_t apart = largest(chunks.apart);
  const Workspace workspace(like, std::max(workers * apart, largest(chunks.together)));
  for_each_job(num_apart,
               [&](int64_t i, int64_t worker) { body(chunks.apart[i], workspace.data() + worker * apart); });
  for (const Chunk& chunk : chunks.together) body(chunk, workspace.data());
}

// Memory of one thread for one job; a thread has one at a time. Up to kKept bytes stay with the thread for
// its next job, so that no job pays for page faults: four panels of a weight with 65,536 float columns, or a
// hundred ordinary ones. What is larger goes with the job.
class ThreadBuffer {
 public:
  static constexpr int64_t kKept = int64_t{32} << 20;

  explicit ThreadBuffer(int64_t bytes) {
    Memory& memory = of_thread();
    if (checked_sum(bytes, kAlign) <= memory.size) return;
    memory.size = 0;  // first, so that a failing new leaves a thread without memory and without a size
    memory.data.reset();
    memory.data.reset(new char[bytes + kAlign]);
    memory.size = bytes + kAlign;
    advise_huge_pages(memory.data.get(), memory.size);
  }
  ~ThreadBuffer() {
    if (of_thread().size > kKept) of_thread() = {};
  }
  ThreadBuffer(const ThreadBuffer&) = delete;
  ThreadBuffer& operator=(const ThreadBuffer&) = delete;

  char* data() const {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(of_thread().data.get()) + kAlign - 1) /
                                   kAlign * kAlign);
  }

 private:
  static constexpr int64_t kAlign = 64;
  struct Memory {
    std::unique_ptr<char[]> data;
    int64_t size = 0;
  };
  static Memory& of_thread() {
    static thread_local Memory memory;
    return memory;
  }
};

}  // namespace fmoe_ext::gemm
