// What a product is asked for: y [rows, outs] = x [rows, depth] * weight [outs, depth] transposed + bias [outs] or null.
#pragma once
#include <algorithm>
#include "../simd.h"

namespace {
constexpr int64_t GRAIN = 1 << 15;  // products that are worth a thread

struct Call {
  const void *x, *weight, *bias;
  void* y;
  int64_t rows, outs, depth, x_row, weight_row, y_row;
};
}  // namespace
