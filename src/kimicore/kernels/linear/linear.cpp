// Product with weights whose every result is one sum in one order, whatever the number of rows: lanes of the inner dimension
// in one chain, then the lanes in a tree. Row 3 of 7 has the same bits as row 3 of 512.
#include <algorithm>
#include "../simd.h"

namespace {
#if defined(KC_AVX512)
constexpr int TM = 5, TN = 5;  // results of a register tile: 25 sums, 5 + 1 operands
#elif defined(KC_AVX2)
constexpr int TM = 3, TN = 4;
#else
constexpr int TM = 4, TN = 5;
#endif
constexpr int64_t CACHE_BYTES = 256 << 10;  // of rows that are kept close while weights pass by
constexpr int64_t GRAIN = 1 << 15;          // products that are worth a thread

struct Wide {
  typedef float T;
  static constexpr int lanes = W;
  KC_INLINE vf step(vf sum, vf a, vf b) { return fma(a, b, sum); }
  KC_INLINE vf part(const T* p, int n) { return load_part(p, n); }
};
#if defined(__AVX512BF16__) && defined(KC_AVX512)
#define KC_BF16_DOT 1
struct Half {  // pairs of bfloat16, multiplied as they are and summed in float32
  typedef bf16 T;
  static constexpr int lanes = 2 * W;
  KC_INLINE vf step(vf sum, vf a, vf b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  KC_INLINE vf part(const T* p, int n) {
    return (vf)_mm512_maskz_loadu_epi16((__mmask32)((uint64_t{1} << n) - 1), p);
  }
};
#endif

struct Call {
  const void *x, *weight, *bias;
  void* y;
  int64_t rows, outs, depth, x_row, weight_row;
};

template <class P, int M, int N> void tile(const Call& c, int64_t m, int64_t o) {
  typedef typename P::T T;
  const T *x = (const T*)c.x + m * c.x_row, *w = (const T*)c.weight + o * c.weight_row;
  vf sum[M][N] = {};
  int64_t k = 0;
  for (; k + P::lanes <= c.depth; k += P::lanes) {
    vf a[M];
    for (int i = 0; i < M; i++) memcpy(&a[i], x + i * c.x_row + k, sizeof(vf));
    for (int j = 0; j < N; j++) {
      vf b;
      memcpy(&b, w + j * c.weight_row + k, sizeof(vf));
      for (int i = 0; i < M; i++) sum[i][j] = P::step(sum[i][j], a[i], b);
    }
  }
  if (k < c.depth) {
    const int left = (int)(c.depth - k);
    for (int i = 0; i < M; i++) {
      const vf a = P::part(x + i * c.x_row + k, left);
      for (int j = 0; j < N; j++) sum[i][j] = P::step(sum[i][j], a, P::part(w + j * c.weight_row + k, left));
    }
  }
  T* y = (T*)c.y + m * c.outs + o;
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++)
      narrow(lanes_sum(sum[i][j]) + (c.bias ? widen(((const T*)c.bias)[o + j]) : 0.f), y + i * c.outs + j);
}
template <class P, int N> void columns(const Call& c, int64_t m, int64_t last, int64_t o) {
  for (; m + TM <= last; m += TM) tile<P, TM, N>(c, m, o);
  switch (last - m) {
    case 4: return tile<P, 4, N>(c, m, o);
    case 3: return tile<P, 3, N>(c, m, o);
    case 2: return tile<P, 2, N>(c, m, o);
    case 1: return tile<P, 1, N>(c, m, o);
  }
}

template <class P> void run(const Call& c, int threads, parallel_entry entry) {
  const int64_t tiles = (c.outs + TN - 1) / TN;
  const int64_t row_bytes = (int64_t)sizeof(typename P::T) * std::max<int64_t>(c.depth, 1);
  const int64_t close = std::max<int64_t>(TM, CACHE_BYTES / row_bytes / TM * TM);
  const int useful = (int)std::min<int64_t>(threads, c.rows * c.outs * c.depth / GRAIN);
  shared_range(entry, useful, tiles, [&](int64_t first, int64_t last) {
    for (int64_t m = 0; m < c.rows; m += close) {
      const int64_t stop = std::min(c.rows, m + close);
      for (int64_t t = first; t < last; t++) {
        int64_t o = t * TN;
        if (o + TN <= c.outs) columns<P, TN>(c, m, stop, o);
        else
          for (; o < c.outs; o++) columns<P, 1>(c, m, stop, o);
      }
    }
  });
}
}  // namespace

// Whether bfloat16 (type 1) is served as float32 (type 0) is.
extern "C" int kimicore_linear_types(void) {
#if defined(KC_BF16_DOT)
  return 3;
#else
  return 1;
#endif
}
extern "C" void kimicore_linear(const Call* c, int type, int threads, parallel_entry entry) {
#if defined(KC_BF16_DOT)
  if (type == 1) return run<Half>(*c, threads, entry);
#endif
  (void)type;
  run<Wide>(*c, threads, entry);
}
