// What the kernels find in memory, on the host: rows that are picked through an index, and the division by a
// multiplication.
#include "check.h"
#include "grouped_rows.cuh"  // by -I, so that mutate.py can put another in its place

using namespace fmoe_ext;

namespace {

// n / d wherever its floor is nearest to the next: around multiples of d and powers of two, up to INT32_MAX.
void test_divisor(int d) {
  const Divisor divisor(d);
  const auto check_near = [&](int64_t middle) {
    for (int64_t n = std::max<int64_t>(middle - 2, 0); n <= std::min<int64_t>(middle + 2, INT32_MAX); ++n) {
      const int got = divisor.divide(static_cast<int>(n));
      CHECK(got == n / d, "%ld / %d = %d", static_cast<long>(n), d, got);
    }
  };
  for (int bit = 0; bit < 32; ++bit) check_near(int64_t{1} << bit);
  const int64_t last = INT32_MAX / d;
  for (int64_t i = 0; i <= 40; ++i) {  // the first, the last and some between
    check_near(std::min(i, last) * d);
    check_near(std::max<int64_t>(last - i, 0) * d);
    check_near(last * i / 40 * d);
  }
}
void test_divisors() {
  for (int d = 1; d <= 4096; ++d) test_divisor(d);
  for (int bit = 12; bit < 31; ++bit)
    for (int off = -1; off <= 1; ++off) test_divisor((1 << bit) + off);
  for (const int d : {INT32_MAX, INT32_MAX - 1, 1000003, 1431655765}) test_divisor(d);
  for (const int n : {0, 7, INT32_MAX}) CHECK(Divisor(0).divide(n) == n, "no divisor: %d", n);
}

// Rows by their number, up to `end`; picked ones by what the index says, out of range none.
void test_rows() {
  const float data[8 * 4] = {};
  const int index[] = {15, 0, 16, -1, INT32_MIN, INT32_MAX, 7, 3};
  const Rows<float> plain = rows_from<float>({data, 4, nullptr, 2, 3}, 8);
  const Rows<float> picked = rows_from<float>({data, 4, index, 2, 16}, 7);
  const int expected[] = {7, 0, -1, -1, -1, -1, 3, -1};
  for (int i = 0; i < 8; ++i) {
    const float* const row = expected[i] < 0 ? nullptr : data + expected[i] * 4;
    CHECK(plain.row(i) == data + i * 4, "row %d", i);
    CHECK(picked.row(i) == row, "picked row %d", i);
  }
  CHECK(plain.row(8) == nullptr, "a row past the end");
  CHECK(plain.exists(7) && !plain.exists(8) && !plain.exists(-1), "rows without an index");
  CHECK(plain.divisor.divide(7) == 7, "rows without an index are divided");
  CHECK(picked.exists(15) && !picked.exists(16) && !picked.exists(-1), "rows with an index");
  const Rows<float> many = rows_from<float>({data, 4, index, 2, int64_t{1} << 33}, 8);
  CHECK(many.exists(INT32_MAX - 1) && !many.exists(-1), "more choices than an index can name");
}

}  // namespace

int main() {
  end_after_cpu_seconds(60);
  test_divisors();
  test_rows();
  return finish();
}
