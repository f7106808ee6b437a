// Gated activation: act(gate) * up, both halves of one row.
#include <algorithm>
#include "../simd.h"

namespace {
constexpr int64_t GRAIN = 8192;  // results that are worth a thread

KC_INLINE vf silu(vf x) { return x / (1.f + exp(-x)); }
KC_INLINE vf gelu_tanh(vf x) {  // (1 + tanh(u)) / 2 as 1 / (1 + e^-2u), which loses nothing where tanh nears -1
  const vf inner = 0.7978845608028654f * fma(x * x * x, splat(0.044715f), x);
  return x / (1.f + exp(-2.f * inner));
}

template <class T, bool gelu> void rows(const T* x, T* y, int64_t first, int64_t last, int64_t width, int64_t stride) {
  for (int64_t r = first; r < last; r++) {
    const T *gate = x + r * stride, *up = gate + width;
    T* to = y + r * width;
    for (int64_t i = 0; i < width; i += W) {
      const int left = (int)std::min<int64_t>(width - i, W);
      const vf g = load_part(gate + i, left);
      store_part(to + i, (gelu ? gelu_tanh(g) : silu(g)) * load_part(up + i, left), left);
    }
  }
}

template <class T>
void run(const void* x, void* y, int64_t tokens, int64_t width, int64_t stride, int gelu, int threads, parallel_entry entry) {
  const int useful = (int)std::min<int64_t>(threads, tokens * width / GRAIN);
  shared_range(entry, useful, tokens, [&](int64_t first, int64_t last) {
    if (gelu) rows<T, true>((const T*)x, (T*)y, first, last, width, stride);
    else rows<T, false>((const T*)x, (T*)y, first, last, width, stride);
  });
}
}  // namespace

// type: 0 float32, 1 bfloat16, 2 float16.
extern "C" void kimicore_gated_act(const void* x, void* y, int64_t tokens, int64_t width, int64_t stride, int type, int gelu,
                                   int threads, parallel_entry entry) {
  if (type == 0) run<float>(x, y, tokens, width, stride, gelu, threads, entry);
  else if (type == 1) run<bf16>(x, y, tokens, width, stride, gelu, threads, entry);
  else run<f16>(x, y, tokens, width, stride, gelu, threads, entry);
}
