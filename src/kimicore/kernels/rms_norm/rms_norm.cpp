// Root-mean-square normalization with the residual addition before it: one row after another, sums in a fixed order.
#include <algorithm>
#include <type_traits>
#include "../simd.h"

namespace {
constexpr int64_t GRAIN = 16384;  // elements that are worth a thread

template <class T, class F>
void row(const T* x, const T* residual, const F* weight, float eps, int64_t n, T* y, T* total) {
  constexpr int CHAINS = 4;  // sums side by side, to hide the adder's latency
  vf squares[CHAINS] = {};
  int64_t i = 0;
  auto one = [&](int64_t at, vf& sum) {
    const int left = (int)std::min<int64_t>(n - at, W);
    vf v = load_part(x + at, left);
    if (residual) {
      v = v + load_part(residual + at, left);
      store_part(total + at, v, left);
      v = load_part(total + at, left);  // as it was rounded
    }
    sum = fma(v, v, sum);
  };
  for (; i + CHAINS * W <= n; i += CHAINS * W)
    for (int j = 0; j < CHAINS; j++) one(i + j * W, squares[j]);
  for (; i < n; i += W) one(i, squares[0]);
  const float mean = lanes_sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)n;
  const float factor = 1.f / std::sqrt(mean + eps);
  const T* from = residual ? total : x;
  for (i = 0; i < n; i += W) {
    const int left = (int)std::min<int64_t>(n - i, W);
    vf v = load_part(from + i, left) * factor;
    if constexpr (std::is_same<F, T>::value && !std::is_same<T, float>::value) {  // rounded before the weight
      store_part(y + i, v, left);
      v = load_part(y + i, left);
    }
    store_part(y + i, v * load_part(weight + i, left), left);
  }
}

struct Call {
  const void *x, *residual, *weight;
  void *y, *total;
  int64_t outer, inner, n, x_outer, x_inner, residual_row;  // x [outer, inner, n] in its strides; y and total dense
  float eps;
  int32_t threads;
  parallel_entry entry;
};

template <class T, class F> void run(const Call& c) {
  const int64_t rows = c.outer * c.inner;
  const int threads = (int)std::min<int64_t>(c.threads, rows * c.n / GRAIN);
  shared_range(c.entry, threads, rows, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
      const T* residual = c.residual ? (const T*)c.residual + r * c.residual_row : nullptr;
      row<T, F>((const T*)c.x + r / c.inner * c.x_outer + r % c.inner * c.x_inner, residual, (const F*)c.weight, c.eps, c.n,
                (T*)c.y + r * c.n, (T*)c.total + r * c.n);
    }
  });
}
}  // namespace

// type: 0 float32, 1 bfloat16, 2 float16; wide: the weight is float32.
extern "C" void kimicore_rms_norm(const Call* c, int type, int wide) {
  if (type == 0) run<float, float>(*c);
  else if (type == 1) wide ? run<bf16, float>(*c) : run<bf16, bf16>(*c);
  else wide ? run<f16, float>(*c) : run<f16, f16>(*c);
}
