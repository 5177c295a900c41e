// Every CPU kernel of 64-bit Arm, without torch: products and sums against double, activations against the
// portable set. Seconds in an emulator, where the tests of the operators take an hour; tests/aarch64/run.sh
// runs both.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "gemm/isa.h"
#include "packed_rows.h"

namespace {

using namespace fmoe_ext;
using namespace fmoe_ext::gemm;
using Bytes = std::vector<char>;

enum Type { kFloat32, kFloat64, kBfloat16, kFloat16 };
constexpr const char* kTypeNames[] = {"float32", "float64", "bfloat16", "float16"};
constexpr int64_t kWide = 64;  // columns of results that are written with a stride

struct Set {
  const char* name;
  Type type;
  const Kernels* kernels;
  Type acc() const { return type == kFloat64 ? kFloat64 : kFloat32; }
  Type operand() const { return kernels->operand_bytes == kernels->storage_bytes ? type : kFloat32; }
  double rounding() const {  // of a stored value
    return type == kFloat64 ? 1e-14 : type == kFloat32 ? 1e-6 : type == kBfloat16 ? 5e-3 : 6e-4;
  }
};

double get(Type type, const Bytes& from, int64_t i) {
  if (type == kFloat64) return reinterpret_cast<const double*>(from.data())[i];
  if (type == kFloat32) return reinterpret_cast<const float*>(from.data())[i];
  if (type == kFloat16) return reinterpret_cast<const __fp16*>(from.data())[i];
  const uint32_t bits = uint32_t(reinterpret_cast<const uint16_t*>(from.data())[i]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void set(Type type, Bytes& to, int64_t i, double value) {
  if (type == kFloat64) reinterpret_cast<double*>(to.data())[i] = value;
  if (type == kFloat32) reinterpret_cast<float*>(to.data())[i] = value;
  if (type == kFloat16) reinterpret_cast<__fp16*>(to.data())[i] = value;
  if (type != kBfloat16) return;
  const float narrow = value;
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof(bits));
  reinterpret_cast<uint16_t*>(to.data())[i] = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

int64_t bytes_of(Type type) { return type == kFloat64 ? 8 : type == kFloat32 ? 4 : 2; }
Bytes zeros(Type type, int64_t n) { return Bytes(n * bytes_of(type) + kPackSlack, 0); }

double draw() {  // in [-1, 1), always the same
  static uint64_t state = 1;
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return double(state >> 33) / double(1u << 30) - 1;
}

Bytes random(Type type, int64_t n) {
  Bytes values = zeros(type, n);
  for (int64_t i = 0; i < n; ++i) set(type, values, i, draw());
  return values;
}

// The elements of a block, in the role that the kernel takes them in.
class Elements {
 public:
  explicit Elements(const Bytes& block) : data_(block.data()) {}
  template <class Role>
  operator Role*() const {
    return reinterpret_cast<Role*>(const_cast<char*>(data_));
  }

 private:
  const char* data_;
};

template <class Role = Stored>
std::vector<const Role*> row_pointers(Type type, const Bytes& rows, int64_t num_rows, int64_t stride) {
  std::vector<const Role*> pointers;
  const Role* first = Elements(rows);
  for (int64_t r = 0; r < num_rows; ++r) pointers.push_back(advance(first, r * stride, bytes_of(type)));
  return pointers;
}

int64_t num_checks = 0;

void check(const Set& s, const char* what, double got, double wanted, double tolerance) {
  ++num_checks;
  if (std::fabs(got - wanted) <= tolerance * (1 + std::fabs(wanted))) return;
  std::printf("%s %s: %s gives %.9g, not %.9g\n", s.name, kTypeNames[s.type], what, got, wanted);
  std::exit(1);
}

// Every way to multiply A [m, k] by B [k, nr], of which n columns are there.
void check_products(const Set& s, int64_t m, int64_t k) {
  const Kernels& kernels = *s.kernels;
  const int64_t nr = kernels.nr, mr = kernels.mr, n = m % 3 ? nr : nr - 1;
  const int64_t line = 64 / kernels.operand_bytes, stride = ((k + line - 1) / line | 1) * line;
  const Bytes a = random(s.type, m * k), b = random(s.type, nr * k);  // b: one column of B after the other
  Bytes b_rows = zeros(s.type, k * nr), block = zeros(s.operand(), k * std::max(m, mr));
  std::vector<double> wanted(m * nr);
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      set(s.type, b_rows, i * nr + j, get(s.type, b, j * k + i));
      for (int64_t r = 0; r < m; ++r)
        wanted[r * nr + j] += get(s.type, a, r * k + i) * get(s.type, b, j * k + i);
    }
    for (int64_t r = 0; r < std::min(m, mr); ++r)
      set(s.operand(), block, i * mr + r, get(s.type, a, r * k + i));
  }
  Bytes tile;
  const auto compare = [&](const char* what, const std::function<void()>& multiply) {
    tile = Bytes(std::max(m, mr) * nr * kernels.acc_bytes, 0x55);
    multiply();
    const double tolerance = (s.acc() == kFloat64 ? 1e-13 : 1e-5) * std::sqrt(k);
    for (int64_t r = 0; r < m; ++r)
      for (int64_t j = 0; j < n; ++j)
        check(s, what, get(s.acc(), tile, r * nr + j), wanted[r * nr + j], tolerance);
  };
  Bytes rows = zeros(s.operand(), m * stride), panel = zeros(s.operand(), (k + 1) * nr), packed = panel;
  packed.resize((k + 1) * mr * kernels.operand_bytes + kPackSlack);
  kernels.copy_rows(row_pointers(s.type, a, m, k).data(), m, k, Elements(rows), stride);
  auto columns = row_pointers(s.type, b, nr, k);
  for (int64_t j = n; j < nr; ++j) columns[j] = nullptr;
  compare("multiply_columns",
          [&] { kernels.multiply_columns(m, k, Elements(rows), stride, columns.data(), Elements(tile)); });
  compare("multiply_rows_of", [&] {
    kernels.multiply_rows_of(m, 0, k, k, Elements(rows), stride, Elements(b_rows), nr, n, Elements(tile));
  });
  if (m > mr) return;  // only products with few rows take more of them than a tile has
  compare("pack_columns", [&] {
    kernels.pack_columns(columns.data(), k, Elements(panel));
    kernels.multiply_row_major(m, k, Elements(rows), stride, Elements(panel), Elements(tile));
  });
  compare("pack_rows", [&] {
    kernels.pack_rows(row_pointers(s.type, b_rows, k, nr).data(), k, 0, n, nr, Elements(panel), 0);
    kernels.multiply_row_major(m, k, Elements(rows), stride, Elements(panel), Elements(tile));
  });
  compare("multiply_transposed", [&] {
    kernels.pack_operand_rows(row_pointers<Operand>(s.operand(), block, k, mr).data(), k, 0, m, mr,
                              Elements(packed), 0);
    kernels.multiply_transposed(m, k, Elements(packed), mr * kernels.k_step, Elements(panel), Elements(tile));
  });
  if (kernels.k_step > 1) return;
  const int64_t wide = mr + 5;
  Bytes in_place = zeros(s.operand(), k * wide);
  for (int64_t i = 0; i < k; ++i)
    for (int64_t r = 0; r < m; ++r) set(s.operand(), in_place, i * wide + r, get(s.type, a, r * k + i));
  compare("multiply_transposed, in place", [&] {
    kernels.multiply_transposed(m, k, Elements(in_place), wide, Elements(panel), Elements(tile));
  });
}

// What is done with a tile: n of its columns, in rows of kWide.
void check_stores(const Set& s, int64_t n) {
  const Kernels& kernels = *s.kernels;
  const Bytes tile = random(s.acc(), kernels.mr * kernels.nr), scale = random(s.acc(), kernels.mr);
  const Bytes bias = random(s.type, n);
  Bytes stored = zeros(s.type, kernels.mr * kWide), streamed = stored,
        sums = zeros(s.acc(), kernels.mr * kWide);
  kernels.store(Elements(tile), kernels.mr, n, Elements(bias), Elements(scale), Elements(stored), kWide);
  kernels.stream(Elements(tile), kernels.mr, n, Elements(streamed), kWide);
  kernels.end_stream();
  for (int i = 0; i < 2; ++i) kernels.accumulate(Elements(tile), kernels.mr, n, Elements(sums), kWide);
  for (int64_t r = 0; r < kernels.mr; ++r)
    for (int64_t j = 0; j < n; ++j) {
      const double value = get(s.acc(), tile, r * kernels.nr + j);
      const int64_t at = r * kWide + j;
      check(s, "store", get(s.type, stored, at), (value + get(s.type, bias, j)) * get(s.acc(), scale, r),
            s.rounding());
      check(s, "stream", get(s.type, streamed, at), value, s.rounding());
      check(s, "accumulate", get(s.acc(), sums, at), 2 * value, 1e-7);
    }
}

void check_sums(const Set& s, int64_t n) {
  constexpr int64_t kRows = 40;
  const Kernels& kernels = *s.kernels;
  const Bytes rows = random(s.type, kRows * kWide), x = random(s.type, kWide);
  Bytes operands = zeros(s.operand(), kRows * kWide), out = zeros(s.type, kWide), product = zeros(s.acc(), 1);
  for (int64_t i = 0; i < kRows * kWide; ++i) set(s.operand(), operands, i, get(s.type, rows, i));
  std::vector<double> sums(kWide), wanted(kWide);
  kernels.sum_over_rows(Elements(operands), kWide, kRows, n, nullptr, sums.data());
  kernels.sum_rows(row_pointers(s.type, rows, kRows, kWide).data(), kRows, n, Elements(out));
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t r = 0; r < kRows; ++r) wanted[j] += get(s.type, rows, r * kWide + j);
    check(s, "sum_over_rows", sums[j], wanted[j], 1e-5);
    check(s, "sum_rows", get(s.type, out, j), wanted[j], 2 * s.rounding());
  }
  double dot = 0;
  for (int64_t j = 0; j < n; ++j) dot += get(s.type, x, j) * get(s.type, rows, j);
  kernels.dot(Elements(x), Elements(rows), n, Elements(product));
  check(s, "dot", get(s.acc(), product, 0), dot, 1e-5);
}

// h, a, dh and the sum of one column, which every set has.
std::vector<double> activated(const Set& s, CurveKind curve, bool gated, const std::vector<double>& inputs) {
  constexpr int64_t kUp = 16;
  const Kernels& kernels = *s.kernels;
  Bytes tile = zeros(s.acc(), kernels.nr), scale = zeros(s.acc(), 1), dscale = scale;
  Bytes h = zeros(s.type, kWide), a = zeros(s.operand(), kWide), dh = a, scaled = a;
  set(s.acc(), tile, 0, inputs[0]);
  set(s.acc(), tile, kernels.nr / 2, inputs[1]);
  set(s.acc(), scale, 0, inputs[2]);
  kernels.act_forward(
      {curve, gated, Elements(tile), 1, 1, nullptr, Elements(h), kWide, kUp, Elements(a), kWide});
  kernels.act_backward({curve, gated, Elements(tile), 1, 1, Elements(h), kWide, kUp, Elements(scale),
                        Elements(dh), kWide, Elements(scaled), kWide, Elements(dscale)});
  return {get(s.type, h, 0),       get(s.type, h, kUp),       get(s.operand(), a, 0),
          get(s.operand(), dh, 0), get(s.operand(), dh, kUp), get(s.operand(), scaled, 0),
          get(s.acc(), dscale, 0)};
}

void check_activations(const Set& s, const Set& portable) {
  for (const Activation& activation : kActivations)
    for (double gate = -12; gate <= 12; gate += 0.37) {
      const std::vector<double> inputs = {gate, draw(), draw()};
      const auto got = activated(s, activation.curve, activation.gated, inputs);
      const auto wanted = activated(portable, activation.curve, activation.gated, inputs);
      for (size_t i = 0; i < got.size(); ++i) check(s, "an activation", got[i], wanted[i], 2 * s.rounding());
    }
}

// A packed weight: every set decodes to the bits of the portable one, and products are those of the values.
void check_packed(const Set& s, const Set& portable, PackedFormat format) {
  constexpr int64_t kColumns = 512;
  const Kernels& kernels = *s.kernels;
  const char* name = kFormatNames[static_cast<int64_t>(format)];
  std::vector<std::unique_ptr<RandomRow>> stored;
  std::vector<PackedRow> columns;
  std::vector<Bytes> values;
  const Kernels& wide = *portable_kernels().float64;
  for (int64_t j = 0; j < kernels.nr; ++j) {
    stored.push_back(std::make_unique<RandomRow>(format, kColumns, j));
    columns.push_back(stored.back()->row());
    values.push_back(zeros(kFloat64, kColumns));
    wide.decode(columns[j], 0, kColumns, Elements(values[j]));
    for (const int64_t begin : {0, 32, 256}) {
      Bytes got = zeros(s.type, kColumns), wanted = got;
      kernels.decode(columns[j], begin, kColumns - begin, Elements(got));
      portable.kernels->decode(columns[j], begin, kColumns - begin, Elements(wanted));
      if (std::memcmp(got.data(), wanted.data(), (kColumns - begin) * bytes_of(s.type)) == 0) continue;
      std::printf("%s %s: %s decodes to other bits than the portable set\n", s.name, kTypeNames[s.type],
                  name);
      std::exit(1);
    }
  }
  for (int64_t m = 1; m <= kernels.packed_rows; ++m) {
    const Bytes a = random(s.operand(), m * kColumns);
    Bytes tile = zeros(s.acc(), m * kernels.nr);
    kernels.multiply_packed(m, kColumns, Elements(a), kColumns, columns.data(), 1, Elements(tile));
    for (int64_t r = 0; r < m; ++r)
      for (int64_t j = 0; j < kernels.nr; ++j) {
        double sum = 0, size = 0;
        for (int64_t i = 0; i < kColumns; ++i) {
          const double product = get(s.operand(), a, r * kColumns + i) * get(kFloat64, values[j], i);
          sum += product;
          size += std::fabs(product);
        }
        check(s, name, get(s.acc(), tile, r * kernels.nr + j) / size, sum / size, 1e-6);
      }
  }
}

void check_all(const Set& s, const Set& portable) {
  num_checks = 0;
  for (const int64_t k : {1, 2, 3, 4, 5, 8, 31, 64, 513, 1030})
    for (int64_t m = 1; m <= s.kernels->few_rows_transposed + 1; ++m) check_products(s, m, k);
  for (int64_t n = 1; n <= s.kernels->nr; ++n) check_stores(s, n);
  for (const int64_t n : {1, 3, 4, 7, 8, 37}) check_sums(s, n);
  check_activations(s, portable);
  for (int64_t f = 1; f < kNumPackedFormats; ++f) check_packed(s, portable, static_cast<PackedFormat>(f));
  std::printf("%s %s: %lld values are right\n", s.name, kTypeNames[s.type], (long long)num_checks);
}

}  // namespace

int main() {
  const auto check_set = [](const char* name, const KernelSet& set) {
    const KernelSet portable = portable_kernels();
    const Kernels *tables[] = {set.float32, set.float64, set.bfloat16, set.float16},
                  *others[] = {portable.float32, portable.float64, portable.bfloat16, portable.float16};
    for (const Type type : {kFloat32, kFloat64, kBfloat16, kFloat16})
      if (tables[type]) check_all({name, type, tables[type]}, {"portable", type, others[type]});
  };
  check_set("portable", portable_kernels());
  check_set("neon", neon_kernels());
  check_set("neon_bf16", neon_bf16_kernels());
}
