// The product on processors with AVX-512, whose 32 registers hold a square tile of sums.
#pragma once
#include "call.h"

namespace {
constexpr int TM = 5, TN = 5;  // results of a register tile: 25 sums, 5 + 1 operands
constexpr int64_t CACHE_BYTES = 256 << 10;  // of rows that are kept close while weights pass by

struct Wide {
  typedef float T;
  static constexpr int lanes = W;
  KC_INLINE vf step(vf sum, vf a, vf b) { return fma(a, b, sum); }
  KC_INLINE vf part(const T* p, int n) { return load_part(p, n); }
};
#if defined(__AVX512BF16__)
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

template <class P, int M, int N> void tile(const Call& c, int64_t m, int64_t o) {
  typedef typename P::T T;
  const T *x = (const T*)c.x + m * c.x_row, *w = (const T*)c.weight + o * c.weight_row;
  vf sum[M][N] = {};
  int64_t k = 0;
  for (; k + P::lanes <= c.depth; k += P::lanes) {
    vf a[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) memcpy(&a[i], x + i * c.x_row + k, sizeof(vf));
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      vf b;
      memcpy(&b, w + j * c.weight_row + k, sizeof(vf));
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) sum[i][j] = P::step(sum[i][j], a[i], b);
    }
  }
  if (k < c.depth) {
    const int left = (int)(c.depth - k);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      const vf a = P::part(x + i * c.x_row + k, left);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sum[i][j] = P::step(sum[i][j], a, P::part(w + j * c.weight_row + k, left));
    }
  }
  T* y = (T*)c.y + m * c.y_row + o;
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++)
      narrow(lanes_sum(sum[i][j]) + (c.bias ? widen(((const T*)c.bias)[o + j]) : 0.f), y + i * c.y_row + j);
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

// Outputs [first, last).
template <class P> void wide_range(const Call& c, int64_t first, int64_t last) {
  const int64_t row_bytes = (int64_t)sizeof(typename P::T) * std::max<int64_t>(c.depth, 1);
  const int64_t close = std::max<int64_t>(TM, CACHE_BYTES / row_bytes / TM * TM);
  for (int64_t m = 0; m < c.rows; m += close) {
    const int64_t stop = std::min(c.rows, m + close);
    int64_t o = first;
    for (; o + TN <= last; o += TN) columns<P, TN>(c, m, stop, o);
    for (; o < last; o++) columns<P, 1>(c, m, stop, o);
  }
}
template <class P> void run(const Call& c, int threads, parallel_entry entry) {
  const int64_t tiles = (c.outs + TN - 1) / TN;
  const int useful = (int)std::min<int64_t>(threads, c.rows * c.outs * c.depth / GRAIN);
  shared_range(entry, useful, tiles, [&](int64_t first, int64_t last) {
    wide_range<P>(c, first * TN, std::min(c.outs, last * TN));
  });
}
#if defined(KC_BF16_DOT)
// bfloat16: as above, with two changes that leave every bit as it is. The lanes of 16 results are summed together, in the
// tree of lanes_sum(), and the weights of the next panel are fetched while this one is computed.
constexpr int HM = 6, HN = 4;  // results of a register tile: 24 sums, 1 + 4 operands
// Of weights that are kept close while rows pass by: so many bytes, and more where that is less than LEAST_OUTS outputs.
constexpr int64_t PANEL_BYTES = 64 << 10, PANEL_MAX_BYTES = 256 << 10, LEAST_OUTS = 16;

// A level of the tree for two vectors at once: lanes n apart are added, sums of a and of b in turns of n lanes.
KC_INLINE vf fold8(vf a, vf b) {
  return (vf)_mm512_mask_blend_ps(0xff00, a, b) + (vf)_mm512_shuffle_f32x4(a, b, 0x4e);
}
KC_INLINE vf fold4(vf a, vf b) {
  const vf swapped = _mm512_mask_blend_ps(0x0f0f, a, b);
  return (vf)_mm512_mask_blend_ps(0xf0f0, a, b) + (vf)_mm512_shuffle_f32x4(swapped, swapped, 0xb1);
}
KC_INLINE vf fold2(vf a, vf b) {
  return (vf)_mm512_mask_blend_ps(0xcccc, a, b) + (vf)_mm512_shuffle_pd((__m512d)a, (__m512d)b, 0x55);
}
KC_INLINE vf fold1(vf a, vf b) {
  return (vf)_mm512_mask_blend_ps(0xaaaa, a, b) + (vf)_mm512_permute_ps(_mm512_mask_blend_ps(0x5555, a, b), 0xb1);
}
// Lane 4 * i + j: the sum of the lanes of s[i][j].
KC_INLINE vf lanes_sums(const vf (*s)[HN], int rows) {
  const vf none{};
  vf d[HN];
#pragma GCC unroll 8
  for (int j = 0; j < HN; j++)
    d[j] = fold4(fold8(s[0][j], rows > 2 ? s[2][j] : none), fold8(rows > 1 ? s[1][j] : none, rows > 3 ? s[3][j] : none));
  return fold1(fold2(d[0], d[2]), fold2(d[1], d[3]));
}

// M rows from m by HN outputs from o; fetches F rows of weights from next.
template <int M, int F> void half_tile(const Call& c, int64_t m, int64_t o, const bf16* next) {
  const bf16 *x = (const bf16*)c.x + m * c.x_row, *w = (const bf16*)c.weight + o * c.weight_row;
  vf sum[M][HN] = {};
  int64_t k = 0;
  for (; k + Half::lanes <= c.depth; k += Half::lanes) {
    vf b[HN];
#pragma GCC unroll 8
    for (int j = 0; j < HN; j++) memcpy(&b[j], w + j * c.weight_row + k, sizeof(vf));
#pragma GCC unroll 8
    for (int j = 0; j < F; j++) __builtin_prefetch(next + j * c.weight_row + k, 0, 2);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      vf a;
      memcpy(&a, x + i * c.x_row + k, sizeof(vf));
#pragma GCC unroll 8
      for (int j = 0; j < HN; j++) sum[i][j] = Half::step(sum[i][j], a, b[j]);
    }
  }
  if (k < c.depth) {
    const int left = (int)(c.depth - k);
#pragma GCC unroll 8
    for (int j = 0; j < HN; j++) {
      const vf b = Half::part(w + j * c.weight_row + k, left);
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) sum[i][j] = Half::step(sum[i][j], Half::part(x + i * c.x_row + k, left), b);
    }
  }
  vf bias{};
  if (c.bias)
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) bias[i] = widen(((const bf16*)c.bias)[o + i % HN]);
  bf16* y = (bf16*)c.y + m * c.y_row + o;
#pragma GCC unroll 8
  for (int i = 0; i < M; i += 4) {
    bf16 whole[W];
    store(whole, lanes_sums(sum + i, M - i) + bias);
    for (int r = i; r < M && r < i + 4; r++) memcpy(y + r * c.y_row, whole + (r - i) * HN, HN * sizeof(bf16));
  }
}
template <int M> void half_tile(const Call& c, int64_t m, int64_t o, const bf16* next, int fetched) {
  if (fetched == 1) return half_tile<M, 1>(c, m, o, next);
  if (fetched == 2) return half_tile<M, 2>(c, m, o, next);
  if (fetched == 4) return half_tile<M, 4>(c, m, o, next);
  half_tile<M, 0>(c, m, o, next);
}
void half_tile(const Call& c, int64_t m, int rows, int64_t o, const bf16* next, int fetched) {
  switch (rows) {
    case 6: return half_tile<6>(c, m, o, next, fetched);
    case 5: return half_tile<5>(c, m, o, next, fetched);
    case 4: return half_tile<4>(c, m, o, next, fetched);
    case 3: return half_tile<3>(c, m, o, next, fetched);
    case 2: return half_tile<2>(c, m, o, next, fetched);
    case 1: return half_tile<1>(c, m, o, next, fetched);
  }
}

// Outputs [first, last), panel by panel: all rows, in tiles of equal size, pass by a panel, so that weights are read once.
void half_range(const Call& c, int64_t first, int64_t last, int64_t panel) {
  const int64_t tiles = (c.rows + HM - 1) / HM;
  const int fetched = tiles >= 4 ? 1 : tiles >= 2 ? 2 : 4;  // by each of the first tiles: HN rows in all
  for (int64_t p = first; p < last; p += panel) {
    const int64_t end = std::min(last, p + panel);
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t m = c.rows * t / tiles, stop = c.rows * (t + 1) / tiles;
      int64_t o = p;
      for (; o + HN <= end; o += HN) {
        const bool more = t * fetched < HN && o + panel + HN <= last;
        const bf16* next = more ? (const bf16*)c.weight + (o + panel + t * fetched) * c.weight_row : nullptr;
        half_tile(c, m, (int)(stop - m), o, next, more ? fetched : 0);
      }
      for (; o < end; o++) columns<Half, 1>(c, m, stop, o);
    }
  }
}
void run_half(const Call& c, int threads, parallel_entry entry) {
  const int64_t groups = (c.outs + HN - 1) / HN, row_bytes = 2 * std::max<int64_t>(c.depth, 1);
  const int64_t outs = std::max(PANEL_BYTES / row_bytes, std::min(LEAST_OUTS, PANEL_MAX_BYTES / row_bytes));
  const int64_t panel = std::max<int64_t>(1, outs / HN) * HN;
  const int useful = (int)std::min<int64_t>(threads, c.rows * c.outs * c.depth / GRAIN);
  shared_range(entry, useful, groups, [&](int64_t first, int64_t last) {
    half_range(c, first * HN, std::min(c.outs, last * HN), panel);
  });
}
#endif
}  // namespace
