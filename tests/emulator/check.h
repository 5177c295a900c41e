// The little that the C++ test programs share: checks that count, and every landing mode under several seeds.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "emu.h"

inline int failures = 0;

// A program that never ends is killed; time is the processor's, so that a busy machine does no harm.
inline void end_after_cpu_seconds(rlim_t seconds) {
  rlimit limit;
  getrlimit(RLIMIT_CPU, &limit);
  limit.rlim_cur = std::min(limit.rlim_cur, seconds);
  setrlimit(RLIMIT_CPU, &limit);
}

// With EMU_FIRST_FAILURE in the environment a program ends at its first failure.
#define CHECK(condition, ...)                                     \
  do {                                                            \
    if (!(condition) && failures++ < 20) {                        \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
      if (std::getenv("EMU_FIRST_FAILURE")) std::exit(1);         \
    }                                                             \
  } while (0)

// Memory whose last byte is followed by a page that nobody may read: for what a kernel must not read past its
// end, where AddressSanitizer does not look.
template <class T>
struct BeforeGuardPage {
  using value_type = T;
  static size_t pages(size_t count) {
    const size_t page = getpagesize();
    return (count * sizeof(T) + page - 1) / page * page;
  }
  T* allocate(size_t count) {
    char* first = static_cast<char*>(mmap(nullptr, pages(count) + getpagesize(), PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (first == MAP_FAILED) throw std::bad_alloc();
    mprotect(first + pages(count), getpagesize(), PROT_NONE);
    return reinterpret_cast<T*>(first + pages(count)) - count;
  }
  void deallocate(T* data, size_t count) {
    munmap(reinterpret_cast<char*>(data + count) - pages(count), pages(count) + getpagesize());
  }
  bool operator==(const BeforeGuardPage&) const { return true; }
};

// Runs body and checks that it stops with an emu::Error whose text holds `expected`.
template <class Fn>
void check_stops(const char* expected, Fn body) {
  std::string text;
  try {
    body();
  } catch (emu::Error& error) {
    text = error.what();
  }
  CHECK(!text.empty() && text.find(expected) != std::string::npos, "expected an error with '%s', got '%s'",
        expected, text.c_str());
}

// Under the sanitizers work that lands at once shows nothing that later landings do not.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr emu::Landing kLandings[] = {emu::Landing::lazy, emu::Landing::random};
#else
inline constexpr emu::Landing kLandings[] = {emu::Landing::eager, emu::Landing::lazy, emu::Landing::random};
#endif

template <class Fn>
void for_every_schedule(int num_seeds, Fn body) {
  for (int seed = 0; seed < num_seeds; ++seed)
    for (auto landing : kLandings) {
      if (failures) return;
      emu::config = {};
      emu::config.landing = landing;
      emu::config.seed = seed;
      emu::config.preempt = seed % 3 == 2 ? 4 : 0;
      try {
        body();
      } catch (emu::Error& error) {
        CHECK(false, "landing %d, seed %d: %s", static_cast<int>(landing), seed, error.what());
      }
    }
}

inline int finish() {
  std::printf("%s: %lu thread switches, %lu landings, %lu wgmmas, %lu blocks\n", failures ? "FAILED" : "ok",
              static_cast<unsigned long>(emu::statistics.switches),
              static_cast<unsigned long>(emu::statistics.landings),
              static_cast<unsigned long>(emu::statistics.wgmmas),
              static_cast<unsigned long>(emu::statistics.blocks));
  return failures != 0;
}
