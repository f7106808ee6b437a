// Attention over a paged key-value cache: one task (some tokens of a row, one key-value head) and one part of its keys.
//
// What a query gets depends on nothing but its own position and its own keys: scores are sums over the head dimension in one
// chain, keys are cut at multiples of SPLIT of their absolute position, each part is weighed with its own maximum and
// summed key after key, and parts are combined from the first to the last. Tiles, chunks, neighbours and threads change none of it.
#pragma once
#include <algorithm>
#include <type_traits>
#include "call.h"
#include "halves.h"
#include "unpack.h"

namespace {
constexpr int ROWS = 96;  // query rows (tokens * grouped heads) of a task

// PACKED: blocks before a task's own one are read from packed ones. All queries of such a task stand in one block.
template <class T, class P, bool PACKED> struct Attention {
  typedef typename P::Q E;
  static constexpr bool wide = std::is_same<P, WidePair>::value;
  const Call& c;
  int group, padded, depth;  // heads per kv head; dim rounded up to vectors; packed elements of a head
  int shift;                 // block_tokens = 1 << shift
  bool even_vectors;         // no vector of a packed token's channels is filled in part, or lies in both of its halves
  bool matrix = false;       // products go by matrix tiles

  explicit Attention(const Call& call) : c(call), group(call.heads / call.kv_heads) {
    padded = (c.dim + W - 1) / W * W;
    depth = (c.dim + P::depth - 1) / P::depth;
    shift = __builtin_ctz((unsigned)c.block_tokens);
    even_vectors = (c.bits == 4 ? c.dim / 2 : c.dim) % (P::depth * W) == 0;
#if defined(KC_AMX)
    static const bool allowed = amx::allowed();
    matrix = !wide && allowed && c.dim % KEYS_TILE == 0;
#endif
  }
  int tile_rows() const { return matrix ? MATRIX_ROWS : TILE_ROWS; }
  static constexpr int tile_keys = wide ? W : KEYS_TILE;

  const T* block(const Task& t, int key, int which) const {
    int64_t slot = t.table[key >> shift];
    int64_t inner = ((int64_t)c.layer * 2 + which) * c.kv_heads + t.head;
    return (const T*)c.kv + slot * c.slot_stride + ((inner << shift) + (key & (c.block_tokens - 1))) * c.dim;
  }
  bool is_packed(const Task& t, int key) const { return PACKED && key >> shift < (end_part(t) - 1) >> shift; }
  const uint8_t* packed_block(const Task& t, int key) const {
    int64_t slot = c.packed_table[t.row * c.packed_table_stride + (key >> shift)];
    return c.packed + slot * c.packed_stride + c.layer * c.layer_bytes;
  }
  int64_t token(const Task& t, int key) const { return ((int64_t)t.head << shift) + (key & (c.block_tokens - 1)); }
  const f16* key_scales(const Task& t, int key) const {
    return (const f16*)(packed_block(t, key) + c.key_scales) + (int64_t)t.head * 2 * c.dim;
  }
  const f16* value_scales(const Task& t, int key) const {
    return (const f16*)(packed_block(t, key) + c.value_scales) + 2 * token(t, key);
  }
  const uint8_t* codes(const Task& t, int key, int which) const {
    return packed_block(t, key) + which * c.value_codes + token(t, key) * (c.dim * c.bits / 8);
  }
  // Where memory of W keys or values begins, in the form in which it is kept, and how much 64 bytes of T take there.
  const char* raw(const Task& t, int key, int which) const {
    if constexpr (PACKED)
      if (is_packed(t, key)) return (const char*)codes(t, key, which);
    return (const char*)block(t, key, which);
  }
  size_t hop() const { return PACKED ? 8 * c.bits / sizeof(T) : 64; }
  // W keys or values of one block as rows of T; the next call overwrites those that are packed.
  const T* tokens(const Task& t, int key, int which) const {
    if constexpr (PACKED)
      if (is_packed(t, key)) {
        T* to = (T*)unpacked.data;
        if (which == 0) __builtin_prefetch(value_scales(t, key), 0, 2);
        if (which == 0 && c.bits == 8) unpack_keys<8>(codes(t, key, 0), key_scales(t, key), c.dim, to);
        else if (which == 0) unpack_keys<4>(codes(t, key, 0), key_scales(t, key), c.dim, to);
        else if (c.bits == 8) unpack_values<8>(codes(t, key, 1), value_scales(t, key), c.dim, to);
        else unpack_values<4>(codes(t, key, 1), value_scales(t, key), c.dim, to);
        return to;
      }
    return block(t, key, which);
  }
  // The next W keys that a thread will need and has not asked for.
  const char* ask(Ahead& ahead) const {
    while (ahead.task < ahead.end && ahead.key >= end_part(*ahead.task))
      if (++ahead.task < ahead.end) ahead.key = lowest(ahead.task->at) & ~(W - 1);
    if (ahead.task >= ahead.end) return nullptr;
    ahead.key += W;
    if constexpr (PACKED) {
      const int key = ahead.key - W;
      if (is_packed(*ahead.task, key) && (key & (c.block_tokens - 1)) == 0)
        for (int d = 0; d < 2 * c.dim; d += 32) __builtin_prefetch(key_scales(*ahead.task, key) + d, 0, 2);
    }
    return raw(*ahead.task, ahead.key - W, 0);
  }
  int position(const Task& t, int r) const { return t.at + r / group; }
  int lowest(int position) const { return c.window > 0 && position >= c.window ? position - c.window + 1 : 0; }

  Work<P> carve(int rows) const {
    if (matrix) rows = (rows + MATRIX_ROWS - 1) / MATRIX_ROWS * MATRIX_ROWS;  // the last tile reaches over the end
    size_t q = (size_t)rows * (padded + W), k = (size_t)SUB * (padded + W), s = (size_t)rows * SPLIT;
    size_t acc = (size_t)rows * padded, few = (size_t)(rows + W) / W * W;
    float* p = (float*)scratch.need((q + 2 * k + s + 2 * acc + 4 * few) * 4);
    Work<P> w;
    auto take = [&p](size_t n) { float* at = p; p += (n + W - 1) / W * W; return at; };
    if (!p || (PACKED && !unpacked.need((size_t)W * padded * 4))) { w.q = nullptr; return w; }
    w.q = (E*)take(q); w.keys = (E*)take(k); w.values = (E*)take(k);
    w.scores = take(s); w.part = take(acc); w.sum = take(acc);
    w.part_max = take(few); w.part_sum = take(few); w.max = take(few); w.total = take(few);
    return w;
  }

  void pack_queries(const Task& t, E* to) const {
    int rows = (t.last - t.first) * group;
    for (int r = 0; r < rows; r++) {
      const T* from = (const T*)c.q + (t.first + r / group) * c.q_token + (t.head * group + r % group) * c.q_head;
      if constexpr (wide) {
        for (int d = 0; d < c.dim; d += W) store(to + (size_t)r * padded + d, load_part(from + d, c.dim - d));
      } else {
        to[(size_t)r * padded + depth - 1] = 0;  // an odd dimension is filled up with a zero
        memcpy(to + (size_t)r * padded, from, (size_t)c.dim * 2);
      }
    }
  }

  // Keys [low, high) of the SUB keys from `base`, transposed to [depth][SUB]; lanes of other keys are zeros.
  void pack_keys(const Task& t, int base, int low, int high, E* to) const {
    const size_t hop = this->hop();
    for (int k = 0; k < SUB; k += W) {
      const int first = std::max(low - base - k, 0), stop = std::min(high - base - k, W);
      if (first >= W || stop <= 0) continue;
      const char* value = raw(t, base + k, 1);
      const int dim = c.dim, depth = this->depth;  // known to the compiler not to change by the stores below
      if constexpr (PACKED)
        if (first == 0 && stop == W && even_vectors && is_packed(t, base + k)) {
          __builtin_prefetch(value_scales(t, base + k), 0, 2);
          const uint8_t* from = codes(t, base + k, 0);
          const f16* scales = key_scales(t, base + k);
          for (int d = 0; d < depth; d += W) {
            vf r[W];
            if (c.bits == 8) key_lanes<8, !wide, T>(from, scales, dim, P::depth * d, r);
            else key_lanes<4, !wide, T>(from, scales, dim, P::depth * d, r);
            transpose(r);
            for (int i = 0; i < W; i++, value += hop) {
              store((float*)to + (size_t)(d + i) * SUB + k, r[i]);
              __builtin_prefetch(value, 0, 2);
            }
          }
          continue;
        }
      const T* from = tokens(t, base + k, 0);  // W keys of one block
      for (int d = 0; d < depth; d += W) {
        const int left = dim - P::depth * d;
        vf r[W];
        if (first == 0 && stop == W && left >= P::depth * W) {
          for (int i = 0; i < W; i++) r[i] = lanes(from + i * dim + P::depth * d);
        } else {
          for (int i = 0; i < W; i++) r[i] = i >= first && i < stop ? lanes_part(from + i * dim + P::depth * d, left) : vf{};
        }
        transpose(r);
        for (int i = 0; i < W && d + i < depth; i++, value += hop) {
          store((float*)to + (size_t)(d + i) * SUB + k, r[i]);
          __builtin_prefetch(value, 0, 2);
        }
      }
    }
  }
  static vf lanes(const T* from) {
    if constexpr (wide) return load(from);
    vf v;
    memcpy(&v, from, sizeof v);
    return v;
  }
  static vf lanes_part(const T* from, int left) {
    if (left >= P::depth * W) return lanes(from);
    if constexpr (wide) return load_part(from, left);
    vf v{};
    memcpy(&v, from, (size_t)left * 2);
    return v;
  }

  // Values of keys [low, high) of the SUB keys from `base`: [SUB][padded], or pairs of keys [SUB / 2][padded].
  void pack_values(const Task& t, int base, int low, int high, E* to, Ahead& ahead) const {
    const int dim = c.dim, padded = this->padded;
    for (int run = low & ~(W - 1); run < high; run += W) {
      const T* from = PACKED ? nullptr : block(t, run, 1);  // W keys of one block
      const char* next = ask(ahead);
      const size_t step = next ? hop() : 0;
      if constexpr (PACKED) {
        if (run >= low && run + W <= high && even_vectors && is_packed(t, run)) {
          const uint8_t* packed = codes(t, run, 1);
          const f16* scales = value_scales(t, run);
          float* row = (float*)to + (size_t)(run - base) / P::depth * padded;
          if (!next) next = (const char*)packed;
          if (c.bits == 8) value_lanes<8, !wide, T>(packed, scales, dim, row, padded, next, step);
          else value_lanes<4, !wide, T>(packed, scales, dim, row, padded, next, step);
          continue;
        }
        from = tokens(t, run, 1);
      }
      if (!next) next = (const char*)from;
      for (int key = std::max(run, low & ~(P::depth - 1)); key < std::min(run + W, high); key += P::depth) {
        const T* even = from + (size_t)(key - run) * dim;
        float* row = (float*)to + (size_t)(key - base) / P::depth * padded;
        const bool both = key >= low && key + 1 < high;
        for (int d = 0; d < dim; d += W, next += step) {
          const int left = dim - d;
          __builtin_prefetch(next, 0, 2);
          if constexpr (wide) {
            store(row + d, load_part(even + d, left));
          } else if (both && left >= W) {
            store(row + d, (vf)((vu)load(even + d) >> 16 | (vu)load(even + dim + d)));
          } else {
            vu lower = key >= low ? (vu)load_part(even + d, left) >> 16 : vu{};
            vu upper = key + 1 < high ? (vu)load_part(even + dim + d, left) : vu{};
            store(row + d, (vf)(lower | upper));
          }
        }
      }
    }
  }

  template <int M, int N>
  void score_tile(const E* q, const E* keys, float* scores) const {
    vf sum[M][N] = {};
    const int depth = this->depth, padded = this->padded;
    for (int d = 0; d < depth; d++) {
      vf b[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) b[j] = load((const float*)keys + (size_t)d * SUB + j * W);
#pragma GCC unroll 8
      for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] = P::step(sum[i][j], q[(size_t)i * padded + d], b[j]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) store(scores + (size_t)i * SPLIT + j * W, sum[i][j]);
  }

  // part[M][N * W] += weights[M][low, high) * values: key after key (or pair after pair).
  template <int M, int N>
  void mix_tile(const E* weights, const E* values, int low, int high, float* part) const {
    vf sum[M][N];
    const int padded = this->padded;
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sum[i][j] = load(part + (size_t)i * padded + j * W);
    for (int k = low / P::depth; k * P::depth < high; k++) {
      vf b[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) b[j] = load((const float*)values + (size_t)k * padded + j * W);
#pragma GCC unroll 8
      for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] = P::step(sum[i][j], weights[(size_t)i * SPLIT + k], b[j]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) store(part + (size_t)i * padded + j * W, sum[i][j]);
  }

  template <int M> void score_rows(const E* q, const E* keys, int low, int high, float* scores) const {
    for (int j = 0; j < SUB; j += TILE_VECS * W)
      if (j + TILE_VECS * W > low && j < high) score_tile<M, TILE_VECS>(q, keys + j, scores + j);
  }
  template <int M> void mix_rows(const E* weights, const E* values, int low, int high, float* part) const {
    int d = 0;
    for (; d + TILE_VECS * W <= padded; d += TILE_VECS * W) mix_tile<M, TILE_VECS>(weights, values + d, low, high, part + d);
    for (; d < padded; d += W) mix_tile<M, 1>(weights, values + d, low, high, part + d);
  }
#define KC_BY_ROWS(m, call)                                                                               \
  switch (m) {                                                                                            \
    case 1: { constexpr int M = 1; call; break; }                                                         \
    case 2: { constexpr int M = 2; call; break; }                                                         \
    case 3: { constexpr int M = 3; call; break; }                                                         \
    case 4: { constexpr int M = 4; call; break; }                                                         \
    case 5: { constexpr int M = 5; call; break; }                                                         \
    default: { constexpr int M = 6; call; break; }                                                        \
  }

  // Scores of one query in keys [low, high) of the part become weights, zero elsewhere in the vectors [from, to).
  void weigh(const Task& t, const Work<P>& w, int r, int base, int low, int high, int from, int to, float* mass) const {
    float* s = w.scores + (size_t)r * SPLIT;
    const float scale = c.scale, softcap = c.softcap;
#if defined(KC_BF16_DOT)
    if constexpr (!wide)
      if (softcap <= 0 && !c.bias && !mass && weigh_halves(s, scale, low, high, from, to, w.part_max[r], w.part_sum[r])) return;
#endif
    const float* bias = c.bias ? c.bias + t.row * c.bias_stride + base : nullptr;
    vf top = splat(-INFINITY);
    for (int j = from; j < to; j += W) {
      vf v = load(s + j) * scale;
      if (softcap > 0) v = softcap * tanh(v / softcap);
      if (bias) v = v + load(bias + j);
      if (j < low || j + W > high) {
        vi key = iota() + j;
        v = (key >= low) & (key < high) ? v : splat(-INFINITY);
      }
      store(s + j, v);
      top = max(v, top);
    }
    float highest = lanes_max(top);
    vf sum{};
    for (int j = from; j < to; j += W) {
      vf v = highest == -INFINITY ? vf{} : exp(load(s + j) - highest);
      if constexpr (wide) {
        store(s + j, v);
      } else {  // the sum is of the rounded weights, so that they add up to one
        bf16* half = (bf16*)s + j;
        store(half, v);
        v = load(half);
      }
      sum = sum + v;
      if (mass)
        for (int i = 0; i < W; i++) mass[(j + i) / c.block_tokens] += v[i];
    }
    w.part_max[r] = highest;
    w.part_sum[r] = lanes_sum(sum);
  }

  void score(const Work<P>& w, int r, int m, int low, int high, int sub) const {
    const E* q = w.q + (size_t)r * padded;
    float* to = w.scores + (size_t)r * SPLIT + sub;
#if defined(KC_AMX)
    if constexpr (!wide)
      if (matrix) return matrix_scores(q, w.keys, low, high, padded, depth, to);
#endif
    KC_BY_ROWS(m, score_rows<M>(q, w.keys, low, high, to));
  }
  void mix(const Work<P>& w, int r, int m, int low, int high, int sub) const {
    const E* weights = (const E*)(w.scores + (size_t)r * SPLIT) + sub / P::depth;
    float* to = w.part + (size_t)r * padded;
#if defined(KC_AMX)
    if constexpr (!wide)
      if (matrix) return matrix_mix(weights, w.values, low, high, padded, to);
#endif
    KC_BY_ROWS(m, mix_rows<M>(weights, w.values, low, high, to));
  }

  // The task's attention within the part that starts at key `base`: part [rows][padded], part_max, part_sum.
  void part(const Task& t, const Work<P>& w, int base, bool measure, float* mass, Ahead& ahead) const {
#if defined(KC_AMX)
    if (matrix) {
      const amx::Tiles tiles(std::min(MATRIX_ROWS, (t.last - t.first) * group));
      return part_of(t, w, base, measure, mass, ahead);
    }
#endif
    part_of(t, w, base, measure, mass, ahead);
  }
  void part_of(const Task& t, const Work<P>& w, int base, bool measure, float* mass, Ahead& ahead) const {
    const int rows = (t.last - t.first) * group, last = position(t, rows - 1), tile = tile_rows(), keys = tile_keys;
    const int low = std::max(base, lowest(t.at)), high = std::min(base + SPLIT, last + 1);
    memset(w.part, 0, sizeof(float) * rows * padded);
    auto bounds = [&](int r, int m, int& from, int& to) {  // keys that any of the rows [r, r + m) sees
      from = std::max(base, lowest(position(t, r))) - base;
      to = std::min(base + SPLIT, position(t, r + m - 1) + 1) - base;
    };
    for (int sub = (low - base) / SUB * SUB; base + sub < high; sub += SUB) {
      pack_keys(t, base + sub, std::max(low, base + sub), std::min(high, base + sub + SUB), w.keys);
      for (int r = 0, m; r < rows; r += m) {
        int from, to;
        m = std::min(tile, rows - r);
        bounds(r, m, from, to);
        if (from < sub + SUB && to > sub) score(w, r, m, from - sub, to - sub, sub);
      }
    }
    for (int r = 0, m; r < rows; r += m) {
      int from, to;
      m = std::min(tile, rows - r);
      bounds(r, m, from, to);
      for (int i = r; i < r + m; i++) {
        int own_from, own_to;
        bounds(i, 1, own_from, own_to);
        if (own_from >= own_to) {  // the row sees nothing here, while others of its tile do
          memset(w.scores + (size_t)i * SPLIT, 0, sizeof(float) * SPLIT);
          w.part_max[i] = -INFINITY;
          w.part_sum[i] = 0;
          continue;
        }
        float* own = measure && i >= rows - group ? mass + (size_t)(i - rows + group) * c.blocks + base / c.block_tokens : nullptr;
        weigh(t, w, i, base, own_from, own_to, std::min(from, to) / keys * keys, (to + keys - 1) / keys * keys, own);
      }
    }
    for (int sub = (low - base) / SUB * SUB; base + sub < high; sub += SUB) {
      const int first = std::max(low, base + sub), stop = std::min(high, base + sub + SUB);
      if (matrix && stop - first < SUB) memset((void*)w.values, 0, sizeof(E) * SUB / P::depth * padded);  // none is left out below
      pack_values(t, base + sub, first, stop, w.values, ahead);
      for (int r = 0, m; r < rows; r += m) {
        int from, to;
        m = std::min(tile, rows - r);
        bounds(r, m, from, to);
        const int step = matrix ? KEYS_TILE : P::depth;
        from = std::max(from - sub, 0) / step * step;
        to = matrix ? std::min((to - sub + step - 1) / step * step, SUB) : std::min(to - sub, SUB);
        if (from < to) mix(w, r, m, from, to, sub);
      }
    }
  }

  // Add a part to what a query has so far.
  void combine(float* sum, float& top, float& total, const float* part, float part_max, float part_sum) const {
    if (part_max == -INFINITY) return;
    float highest = part_max > top ? part_max : top;
    vf old = exp(splat(top - highest)), fresh = exp(splat(part_max - highest));
    for (int d = 0; d < padded; d += W) store(sum + d, fma(load(sum + d), old, load(part + d) * fresh));
    total = total * old[0] + part_sum * fresh[0];
    top = highest;
  }
  void finish(const Task& t, int r, const float* sum, float total) const {
    T* to = (T*)c.out + ((int64_t)(t.first + r / group) * c.heads + t.head * group + r % group) * c.dim;
    float share = total == 0 ? 0.f : 1.f / total;
    for (int d = 0; d < c.dim; d += W) store_part(to + d, load(sum + d) * share + 0.f, c.dim - d);
  }
  // Whether row r has any key in the part: the others' parts are left out of its sum.
  bool sees(const Task& t, int r, int base) const {
    return position(t, r) >= base && lowest(position(t, r)) < base + SPLIT;
  }
  int first_part(const Task& t) const { return lowest(t.at) / SPLIT * SPLIT; }
  int end_part(const Task& t) const { return t.at + t.last - t.first; }
};
}  // namespace
