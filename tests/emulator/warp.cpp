// Warp-wide operations: a lane deposits its operand and sleeps; the last one of the mask computes for all.
#include <algorithm>
#include <bit>

#include "state.h"

namespace emu {
namespace {

template <class Fn>
void for_lanes(uint32_t mask, Fn fn) {
  for (uint32_t lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) fn(lane);
}

uint32_t shuffle_source(const WarpOp& op, uint32_t lane) {
  const uint32_t width = op.in[lane].width, arg = op.in[lane].arg;
  const uint32_t first = lane & ~(width - 1), last = lane | (width - 1);
  switch (op.kind) {
    case WarpOpKind::shfl:
      return first | (arg & (width - 1));
    case WarpOpKind::shfl_up:
      return lane < first + arg ? lane : lane - arg;
    default:
      return (lane ^ arg) > last ? lane : lane ^ arg;
  }
}

void shuffle(WarpOp& op, Operand (&out)[32]) {
  for_lanes(op.mask, [&](uint32_t lane) {
    const uint32_t source = shuffle_source(op, lane);
    if (!(op.mask >> source & 1))
      fail("%s: lane %u reads lane %u, which is not in mask %08x", op.what, lane, source, op.mask);
    out[lane].value = op.in[source].value;
  });
}

// ldmatrix and stmatrix: 8x8 matrices of 16-bit elements; lane 8 q + r holds the address of row r of matrix
// q.
void move_matrices(Warp* warp, WarpOp& op) {
  const bool store = op.kind == WarpOpKind::stmatrix, transposed = op.in[0].width != 0;
  if (op.mask != ~0u) fail("%s needs the whole warp", op.what);
  for (uint32_t q = 0; q < op.in[0].arg; ++q)
    for (uint32_t r = 0; r < 8; ++r) {
      Location l = locate(static_cast<uint32_t>(op.in[q * 8 + r].value), 16, 16);
      Fiber* owner = warp->lane[q * 8 + r];
      if (copy_in_flight(l.cta, l.offset, 16) || (store && store_reading(l.cta, l.offset, 16)))
        fail("%s touches %s during an asynchronous copy", op.what, place(l.cta, l.offset).c_str());
      check_lane_order(l, store, owner, op.what);
      if (store) {
        note_write(owner, l.pointer(), 16);
        note_generic_write(l.cta, l.offset, 16, owner);
      } else {
        note_read(owner, l.pointer(), 16);
        note_generic_read(l.cta, l.offset, 16, owner);
      }
      for (uint32_t e = 0; e < 8; ++e) {
        const uint32_t lane = transposed ? e * 4 + r / 2 : r * 4 + e / 2, half = transposed ? r & 1 : e & 1;
        char* reg = reinterpret_cast<char*>(&op.in[lane].regs[q]) + half * 2;
        char* element = l.pointer() + e * 2;
        store ? std::memcpy(element, reg, 2) : std::memcpy(reg, element, 2);
      }
    }
}

// mma.sync m16n8k16, A by rows, B by columns: registers 0-3 hold A, 4-5 B, 6-9 the accumulator (PTX ISA,
// fragments).
void multiply(WarpOp& op) {
  if (op.mask != ~0u) fail("%s needs the whole warp", op.what);
  const bool is_f16 = op.in[0].arg;
  float a[16][16], b[16][8];
  auto number = [&](uint32_t reg, int h) {
    return element_to_float(static_cast<uint16_t>(reg >> (16 * h)), is_f16);
  };
  for (int lane = 0; lane < 32; ++lane)
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4, col = lane % 4 * 2 + h;
      const uint32_t* r = op.in[lane].regs;
      for (int i = 0; i < 4; ++i) a[row + (i & 1) * 8][col + (i >> 1) * 8] = number(r[i], h);
      for (int i = 0; i < 2; ++i) b[col + i * 8][row] = number(r[4 + i], h);
    }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i >> 1) * 8, col = lane % 4 * 2 + (i & 1);
      float sum = std::bit_cast<float>(op.in[lane].regs[6 + i]);
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][col];
      op.in[lane].regs[6 + i] = std::bit_cast<uint32_t>(sum);
    }
}

void execute(Warp* warp, WarpOp& op) {
  Operand out[32];
  switch (op.kind) {
    case WarpOpKind::sync:
      break;
    case WarpOpKind::shfl:
    case WarpOpKind::shfl_up:
    case WarpOpKind::shfl_xor:
      shuffle(op, out);
      break;
    case WarpOpKind::match_any:
      for_lanes(op.mask, [&](uint32_t lane) {
        for_lanes(op.mask, [&](uint32_t other) {
          out[lane].value |= static_cast<uint64_t>(op.in[other].value == op.in[lane].value) << other;
        });
      });
      break;
    case WarpOpKind::stmatrix:
    case WarpOpKind::ldmatrix:
    case WarpOpKind::mma:
      op.kind == WarpOpKind::mma ? multiply(op) : move_matrices(warp, op);
      // Lane by lane: TSan intercepts memcpy, and would see the emulator write to a thread's stack.
      for_lanes(op.mask, [&](uint32_t lane) { out[lane] = op.in[lane]; });
      break;
    case WarpOpKind::ballot:
      uint64_t votes = 0;
      for_lanes(op.mask, [&](uint32_t lane) { votes |= uint64_t{op.in[lane].value != 0} << lane; });
      for_lanes(op.mask, [&](uint32_t lane) { out[lane].value = votes; });
  }
  for_lanes(op.mask, [&](uint32_t lane) { warp->lane[lane]->result = out[lane]; });
}

WarpOp& join(Fiber* f, WarpOpKind kind, uint32_t mask, const char* what) {
  Warp* warp = f->warp;
  for (auto& op : warp->ops) {
    if (op->mask != mask) continue;
    if (op->kind != kind) fail("%s meets %s in the same warp (mask %08x)", what, op->what, mask);
    return *op;
  }
  warp->ops.push_back(std::make_unique<WarpOp>());
  WarpOp& op = *warp->ops.back();
  op.kind = kind;
  op.mask = mask;
  op.what = what;
  op.token = &warp->tokens[warp->num_ops++ % 16];
  return op;
}

}  // namespace

Operand collective(WarpOpKind kind, uint32_t mask, const Operand& operand, const char* what) {
  Inside inside;
  maybe_preempt();
  Fiber* f = self();
  Warp* warp = f->warp;
  if (!(mask >> f->lane & 1)) fail("%s: lane %u is not in its own mask %08x", what, f->lane, mask);
  WarpOp& op = join(f, kind, mask, what);
  const bool orders_memory = kind == WarpOpKind::sync;  // the other operations do not
  char* token = op.token;
  if (orders_memory) release(f, token);
  op.in[f->lane] = operand;
  op.arrived |= 1u << f->lane;
  if (op.arrived != mask) {
    f->warp_op = &op;
    block(Wait::warp, reinterpret_cast<uintptr_t>(&op));
  } else {
    execute(warp, op);
    for_lanes(mask, [&](uint32_t lane) {
      if (lane != f->lane) wake(warp->lane[lane]);
    });
    std::erase_if(warp->ops, [&](auto& other) { return other.get() == &op; });
  }
  if (orders_memory) {
    acquire(f, token);
    f->ordered = machine.clock;
  }
  return f->result;
}

}  // namespace emu
