// Lists among the arguments of an operator, whose entries csrc/ops.cpp names.
#pragma once

#include <vector>

#include "checks.h"

namespace fmoe_ext {

template <class T>
void check_entries(const std::vector<T>& list, size_t num_entries, const char* name, const char* entries) {
  STD_TORCH_CHECK(list.size() == num_entries, name, " must have ", num_entries, " entries (", entries,
                  "), but got ", list.size());
}

}  // namespace fmoe_ext
