// The product on processors without AVX-512, with weights of float32, or of 16 bits that are widened as they are read.
//
// A result is W chains, chain r over the inner dimension's elements r, r + W, ..., and then a tree over the chains. Two forms
// compute just that, so that they give the same bits: few rows are multiplied where they lie, a vector holding the chains of
// one result; for many rows the operands are packed chain by chain, and a vector holds one chain of W results.
#pragma once
#include "call.h"

namespace {
constexpr int64_t PACKED_ROWS = 32;       // from which packing is repaid
constexpr int PLAIN_OUTS = 24;            // that few rows pass by at once: a multiple of each tile's outputs, ...
constexpr int64_t PLAIN_BYTES = 256 << 10;  // ... or half as many where their weights are larger than this
constexpr int64_t ROWS_BYTES = 4 << 20;   // of packed rows that weights pass by at once
constexpr int PV = 2, PW = PV * W;        // vectors and results beside each other in a packed tile
constexpr int PM = 6, PS = 8;             // rows of a packed tile, and the distance between their elements

thread_local Scratch rows_scratch, weights_scratch;

// The lanes of 1 to W vectors summed in the tree of lanes_sum(): lane i is the sum of s[i].
KC_INLINE vf lanes_sums(const vf* s, int n) {
#if defined(KC_AVX2)
  const vf none{};
  vf h[4], q[2];
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    const vf a = i < n ? s[i] : none, b = i + 4 < n ? s[i + 4] : none;
    h[i] = i < n ? (vf)_mm256_permute2f128_ps(a, b, 0x20) + (vf)_mm256_permute2f128_ps(a, b, 0x31) : none;
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; i++)
    q[i] = (vf)_mm256_shuffle_ps(h[2 * i], h[2 * i + 1], 0x44) + (vf)_mm256_shuffle_ps(h[2 * i], h[2 * i + 1], 0xee);
  return (vf)_mm256_shuffle_ps(q[0], q[1], 0x88) + (vf)_mm256_shuffle_ps(q[0], q[1], 0xdd);
#else
  vf sums{};
  for (int i = 0; i < n; i++) sums[i] = lanes_sum(s[i]);
  return sums;
#endif
}

// What a tile asks memory for while it computes: nothing, the weights of the next outputs, or `step` bytes of a run at a time.
enum Ahead { NOTHING, NEXT, RUN };
struct Run {
  const char* at;
  int64_t step;
};

// M rows from m by N outputs from o, multiplied where they lie.
template <class T, int M, int N, Ahead AHEAD>
void plain_tile(const Call& c, const float* rows, int64_t stride, int64_t m, int64_t o, Run run) {
  const float* x = rows + m * stride;
  const T* w = (const T*)c.weight + o * c.weight_row;
  vf sum[M * N] = {};
  int64_t k = 0;
  for (; k + W <= c.depth; k += W) {
    vf a[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) a[i] = load(x + i * stride + k);
    if (AHEAD == RUN) {
      __builtin_prefetch(run.at, 0, 2);
      run.at += run.step;
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      const vf b = load(w + j * c.weight_row + k);
      if (AHEAD == NEXT) __builtin_prefetch(w + (N + j) * c.weight_row + k, 0, 2);
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) sum[i * N + j] = fma(a[i], b, sum[i * N + j]);
    }
  }
  if (k < c.depth) {
    const int left = (int)(c.depth - k);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      const vf b = load_part(w + j * c.weight_row + k, left);
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) sum[i * N + j] = fma(load_part(x + i * stride + k, left), b, sum[i * N + j]);
    }
  }
  T* y = (T*)c.y + m * c.y_row + o;
  float whole[M * N + W];
#pragma GCC unroll 16
  for (int n = 0; n < M * N; n += W) store(whole + n, lanes_sums(sum + n, std::min(W, M * N - n)));
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++)
      narrow(whole[i * N + j] + (c.bias ? widen(((const T*)c.bias)[o + j]) : 0.f), y + i * c.y_row + j);
}
template <class T, int M>
void plain_columns(const Call& c, const float* x, int64_t stride, int64_t m, int64_t first, int64_t last, Ahead ahead, Run run) {
  constexpr int N = M == 1 ? 8 : M == 2 ? 6 : M == 3 ? 4 : 3;  // as many sums as the registers hold
  int64_t o = first;
  if (ahead == RUN) {
    run.step *= N;
    for (; o + N <= last; o += N, run.at += run.step * (c.depth / W)) plain_tile<T, M, N, RUN>(c, x, stride, m, o, run);
  }
  for (; ahead == NEXT && o + 2 * N <= c.outs && o + N <= last; o += N) plain_tile<T, M, N, NEXT>(c, x, stride, m, o, run);
  for (; o + N <= last; o += N) plain_tile<T, M, N, NOTHING>(c, x, stride, m, o, run);
  for (; o < last; o++) plain_tile<T, M, 1, NOTHING>(c, x, stride, m, o, run);
}
// Outputs [first, last) of few rows: in tiles of nearly equal size, which all pass by some outputs before the next. Each
// tile fetches its share of the outputs after those, so that memory is never waited for nor idle.
template <class T> void plain_range(const Call& c, const float* x, int64_t stride, int64_t first, int64_t last) {
  const int64_t tiles = (c.rows + 3) / 4, row_bytes = std::max<int64_t>(c.depth, 1) * sizeof(T);
  const int64_t outs = row_bytes * PLAIN_OUTS > PLAIN_BYTES ? PLAIN_OUTS / 2 : PLAIN_OUTS;
  for (int64_t o = first; o < last; o += outs) {
    const int64_t stop = std::min(last, o + outs);
    const bool more = stop + outs <= last && c.weight_row == c.depth;
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t m = c.rows * t / tiles;
      const bool one = c.rows == 1 && sizeof(T) == 4;  // is read as fast as memory gives it
      const Ahead ahead = tiles > 1 && more ? RUN : t == 0 && !one ? NEXT : NOTHING;
      const Run run{(const char*)c.weight + (stop + outs * t / tiles) * row_bytes, (int64_t)(W * sizeof(T)) / tiles};
      switch (c.rows * (t + 1) / tiles - m) {
        case 1: plain_columns<T, 1>(c, x, stride, m, o, stop, ahead, run); break;
        case 2: plain_columns<T, 2>(c, x, stride, m, o, stop, ahead, run); break;
        case 3: plain_columns<T, 3>(c, x, stride, m, o, stop, ahead, run); break;
        case 4: plain_columns<T, 4>(c, x, stride, m, o, stop, ahead, run); break;
      }
    }
  }
}

// Packed operands: element k of a row or an output stands in chain k % W at step k / W.
struct Packing {
  int64_t steps, stride;  // of a chain; from chain to chain, odd so that chains do not meet in one set of a cache
  explicit Packing(int64_t depth) : steps((depth + W - 1) / W), stride(steps | 1) {}
  size_t tile_floats() const { return (size_t)W * stride * PS; }
  size_t panel_floats() const { return (size_t)W * stride * PW; }
};
// W elements from k on of up to W rows of `from`, with chains as rows.
template <class T> KC_INLINE void chains(vf* to, const T* from, int64_t row, int64_t k, int rows, int64_t depth) {
  const int left = (int)std::min<int64_t>(W, depth - k);
  if (rows >= W && left == W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) to[i] = load(from + i * row + k);
  } else {
    for (int i = 0; i < W; i++) to[i] = i < rows ? load_part(from + i * row + k, left) : vf{};
  }
  transpose(to);
}
template <class T> void pack_weights(const Call& c, const Packing& p, int64_t o, float* to) {
  for (int v = 0; v < PV; v++)
    for (int64_t s = 0; s < p.steps; s++) {
      vf t[W];
      const int64_t at = o + v * W;
      chains(t, (const T*)c.weight + at * c.weight_row, c.weight_row, s * W, (int)std::min<int64_t>(W, c.outs - at), c.depth);
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) store(to + ((r * p.stride + s) * PV + v) * W, t[r]);
    }
}
template <class T> void pack_rows(const Call& c, const Packing& p, int64_t m, int rows, float* to) {
  for (int64_t s = 0; s < p.steps; s++)
    for (int i = 0; i < PS; i += W) {
      vf t[W];
      chains(t, (const T*)c.x + (m + i) * c.x_row, c.x_row, s * W, rows - i, c.depth);
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) store(to + (r * p.stride + s) * PS + i, t[r]);
    }
}

// M rows by PW outputs: chain after chain, and then their tree.
template <class T, int M> void packed_tile(const Call& c, const Packing& p, const float* x, const float* w, int64_t m, int64_t o) {
  alignas(64) float part[W][M][PW];
  const int64_t steps = p.steps;
  for (int r = 0; r < W; r++) {
    const float *a = x + r * p.stride * PS, *b = w + r * p.stride * PW;
    vf sum[M][PV] = {};
    for (int64_t s = 0; s < steps; s++, a += PS, b += PW) {
      const vf first = load(b), second = load(b + W);
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) {
        const vf row = splat(a[i]);
        sum[i][0] = fma(row, first, sum[i][0]);
        sum[i][1] = fma(row, second, sum[i][1]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      store(part[r][i], sum[i][0]);
      store(part[r][i] + W, sum[i][1]);
    }
  }
  T* y = (T*)c.y + m * c.y_row + o;
  for (int v = 0; v < PV; v++) {
    const int64_t left = c.outs - o - v * W;
    if (left <= 0) break;
    const vf bias = c.bias ? load_part((const T*)c.bias + o + v * W, (int)std::min<int64_t>(W, left)) : vf{};
    for (int i = 0; i < M; i++) {
      vf t[W];
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) t[r] = load(part[r][i] + v * W);
#pragma GCC unroll 4
      for (int n = W / 2; n; n /= 2)
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) t[r] = t[r] + t[r + n];
      store_part(y + i * c.y_row + v * W, t[0] + bias, (int)std::min<int64_t>(W, left));
    }
  }
}

// Rows [m, stop), packed at x, with the panels [first, last) of PW outputs, each packed into w.
template <class T>
void packed_range(const Call& c, const Packing& p, const float* x, float* w, int64_t m, int64_t stop, int64_t first, int64_t last) {
  const int64_t tiles = (stop - m + PM - 1) / PM;
  for (int64_t panel = first; panel < last; panel++) {
    pack_weights<T>(c, p, panel * PW, w);
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t from = (stop - m) * t / tiles, rows = (stop - m) * (t + 1) / tiles - from;
      const float* own = x + t * p.tile_floats();
      switch (rows) {
        case 1: packed_tile<T, 1>(c, p, own, w, m + from, panel * PW); break;
        case 2: packed_tile<T, 2>(c, p, own, w, m + from, panel * PW); break;
        case 3: packed_tile<T, 3>(c, p, own, w, m + from, panel * PW); break;
        case 4: packed_tile<T, 4>(c, p, own, w, m + from, panel * PW); break;
        case 5: packed_tile<T, 5>(c, p, own, w, m + from, panel * PW); break;
        case 6: packed_tile<T, 6>(c, p, own, w, m + from, panel * PW); break;
      }
    }
  }
}
// All rows of a call, or those from m to stop, packed at x by all threads.
template <class T>
void pack_all(const Call& c, const Packing& p, int64_t m, int64_t stop, float* x, int threads, parallel_entry entry) {
  const int64_t count = (stop - m + PM - 1) / PM;
  shared_range(entry, threads, count, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      const int64_t from = (stop - m) * t / count, rows = (stop - m) * (t + 1) / count - from;
      pack_rows<T>(c, p, m + from, (int)rows, x + t * p.tile_floats());
    }
  });
}
// As many rows as are packed at once.
inline int64_t packed_block(const Packing& p) {
  return std::max<int64_t>(PM, ROWS_BYTES / (int64_t)(p.tile_floats() * sizeof(float)) * PM);
}
template <class T> bool run_packed(const Call& c, int threads, parallel_entry entry) {
  const Packing p(c.depth);
  const int64_t block = packed_block(p);
  const int64_t tiles = (std::min(c.rows, block) + PM - 1) / PM, panels = (c.outs + PW - 1) / PW;
  float* x = (float*)rows_scratch.need(tiles * p.tile_floats() * sizeof(float));
  if (!x) return false;
  std::atomic<bool> failed{false};
  for (int64_t m = 0; m < c.rows; m += block) {
    const int64_t stop = std::min(c.rows, m + block);
    pack_all<T>(c, p, m, stop, x, threads, entry);
    shared_range(entry, threads, panels, [&](int64_t first, int64_t last) {
      float* w = (float*)weights_scratch.need(p.panel_floats() * sizeof(float));
      if (w) packed_range<T>(c, p, x, w, m, stop, first, last);
      else failed = true;
    });
  }
  return !failed;
}

// The rows of a call in float32: as they lie, or widened; whether there was memory for that.
struct PlainRows {
  const float* x;
  int64_t stride;
  bool there;
};
template <class T> PlainRows plain_rows(const Call& c) {
  if constexpr (std::is_same<T, float>::value) return {(const float*)c.x, c.x_row, true};
  const int64_t stride = (c.depth + W) / W * W;
  float* wide = (float*)rows_scratch.need(c.rows * stride * sizeof(float));
  if (!wide) return {nullptr, 0, false};
  for (int64_t m = 0; m < c.rows; m++)
    for (int64_t k = 0; k < c.depth; k += W)
      store(wide + m * stride + k, load_part((const T*)c.x + m * c.x_row + k, (int)std::min<int64_t>(W, c.depth - k)));
  return {wide, stride, true};
}
template <class T> bool run_plain(const Call& c, int threads, parallel_entry entry) {
  const PlainRows rows = plain_rows<T>(c);
  if (!rows.there) return false;
  shared_range(entry, threads, c.outs, [&](int64_t first, int64_t last) {
    plain_range<T>(c, rows.x, rows.stride, first, last);
  });
  return true;
}
template <class T> bool run(const Call& c, int threads, parallel_entry entry) {
  if (c.rows == 0) return true;
  const int useful = (int)std::min<int64_t>(threads, c.rows * c.outs * c.depth / GRAIN);
  return c.rows < PACKED_ROWS ? run_plain<T>(c, useful, entry) : run_packed<T>(c, useful, entry);
}
}  // namespace
