// Tiles of 16 outputs of a weight of 4 to 8 bits, one output a lane; see tiled.py for how they lie.
#pragma once
#include "unpack.h"

#if defined(KC_AVX512) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define KC_TILED 1
namespace {
constexpr int64_t LANES = 16, STEP = 8;  // outputs of a tile, columns of a step
constexpr int STEP_HALF = 4;

struct Tiled {
  const uint8_t *codes, *zeros;
  Values scales, offsets;
  int64_t outs, depth, bits, group, zero, block;
  int64_t tiles() const { return (outs + LANES - 1) / LANES; }
  int64_t groups() const { return (depth + group - 1) / group; }
  int64_t blocks() const { return (depth + block - 1) / block; }
  int64_t padded() const { return (depth + ELEMENTS - 1) / ELEMENTS * ELEMENTS; }
  int64_t step_bytes() const { return LANES * bits; }
  const uint8_t* tile_codes(int64_t t) const { return codes + t * (padded() / STEP) * step_bytes(); }
};

// A tile's scales, zeros and offsets in float32, [groups][16] each; the scales [groups][16] of integers for zeros.
struct TileGroups {
  float *scales, *zeros, *offsets;
};
inline int64_t tile_floats(const Tiled& w) { return 3 * w.groups() * LANES; }
inline void read_tile(const Values& v, int64_t t, int64_t groups, float* to) {
  const int64_t count = groups * LANES;
  read_floats(v.data, v.type, t * count, count, to);
  if (!v.super) return;
  const int64_t per = groups / v.runs;
  for (int64_t r = 0; r < v.runs; r++) {
    float super[LANES];
    read_floats(v.super, v.super_type, (t * v.runs + r) * LANES, LANES, super);
    for (int64_t g = r * per; g < (r + 1) * per; g++) store(to + g * LANES, load(to + g * LANES) * load(super));
  }
}
inline TileGroups read_tile_groups(const Tiled& w, int64_t t, float* to) {
  const int64_t groups = w.groups(), count = groups * LANES;
  const TileGroups found{to, to + count, to + 2 * count};
  read_tile(w.scales, t, groups, found.scales);
  if (w.zeros) widened<uint8_t>(w.zeros + t * count, count, found.zeros);
  if (w.offsets.data) read_tile(w.offsets, t, groups, found.offsets);
  return found;
}

// The codes of a step: columns 0 to 3 and 4 to 7, four bytes for each output.
struct Codes {
  __m512i first, second;
};
template <int BITS> KC_INLINE Codes step_codes(const uint8_t* step) {
  if (BITS == 8) return {_mm512_loadu_si512(step), _mm512_loadu_si512(step + 64)};
  const __m512i both = _mm512_loadu_si512(step), fifteen = _mm512_set1_epi8(15);
  Codes c{_mm512_and_si512(both, fifteen), _mm512_and_si512(_mm512_srli_epi16(both, 4), fifteen)};
#pragma GCC unroll 2
  for (int bit = 4; bit < BITS; bit++) {
    uint64_t ones[2];
    memcpy(ones, step + 64 + 16 * (bit - 4), 16);
    c.first = _mm512_or_si512(c.first, _mm512_maskz_set1_epi8(ones[0], (char)(1 << bit)));
    c.second = _mm512_or_si512(c.second, _mm512_maskz_set1_epi8(ones[1], (char)(1 << bit)));
  }
  return c;
}
template <class F> KC_INLINE void with_bits(int64_t bits, F&& body) {
  switch (bits) {
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    case 6: return body(std::integral_constant<int, 6>());
    default: return body(std::integral_constant<int, 8>());
  }
}
template <class F> KC_INLINE void with_parts(const Tiled& w, F&& body) {
  switch ((w.zeros ? ZEROS : 0) | (w.offsets.data ? OFFSETS : 0)) {
    case 0: return body(std::integral_constant<int, 0>());
    case ZEROS: return body(std::integral_constant<int, ZEROS>());
    case OFFSETS: return body(std::integral_constant<int, OFFSETS>());
    default: return body(std::integral_constant<int, ZEROS | OFFSETS>());
  }
}

// What a group's codes mean in a tile, codes less the zero that all have where there is such.
template <int HAS> struct Meaning {
  vf scale, zero{}, offset{};
  Meaning(const TileGroups& groups, int64_t g) : scale(load(groups.scales + g * LANES)) {
    if (HAS & ZEROS) zero = load(groups.zeros + g * LANES);
    if (HAS & OFFSETS) offset = load(groups.offsets + g * LANES);
  }
  inline vf of(vf code) const {
    const vf scaled = (HAS & ZEROS ? code - zero : code) * scale;
    return HAS & OFFSETS ? scaled + offset : scaled;
  }
};
inline float shared_zero(const Tiled& w) { return w.zeros ? 0.f : (float)w.zero; }

// Columns of a step in float32, an output a lane, less the zero that all codes have. Codes of 4 and 5 bits are looked up by the
// lowest bits of a lane; others become the end of a significand, from which its beginning is taken away again.
constexpr float BEGUN = 8388608.f;  // 2 to the 23rd
struct Table {
  vf low, high;
};
inline Table code_table(const Tiled& w) {
  Table t;
  const float zero = shared_zero(w);
  for (int i = 0; i < W; i++) t.low[i] = w.bits > 5 ? BEGUN + zero : (float)i - zero, t.high[i] = (float)(W + i) - zero;
  return t;
}
template <int BITS, int COLUMN> KC_INLINE vf column(const uint8_t* step, const Codes& c, const Table& table) {
  constexpr int AT = COLUMN % STEP_HALF;
  if (BITS == 4) {
    const __m512i both = _mm512_loadu_si512(step);
    constexpr int BY = 8 * AT + (COLUMN < STEP_HALF ? 0 : 4);
    return (vf)_mm512_permutexvar_ps(BY ? _mm512_srli_epi32(both, BY) : both, (__m512)table.low);
  }
  const __m512i four = COLUMN < STEP_HALF ? c.first : c.second;
  if (BITS == 5) return (vf)_mm512_permutex2var_ps((__m512)table.low, AT ? _mm512_srli_epi32(four, 8 * AT) : four, (__m512)table.high);
  const __m512i from = _mm512_broadcast_i32x4(_mm_set_epi32(12 + AT, 8 + AT, 4 + AT, AT));
  return (vf)_mm512_mask_shuffle_epi8((__m512i)splat(BEGUN), 0x1111111111111111, four, from) - table.low;
}
// Goes through a tile's steps, and turns each into bfloat16, pairs of columns side by side: [4][16 outputs][2].
template <int BITS, int HAS> struct Unpacking {
  const uint8_t* codes;
  const TileGroups groups;
  const Table table;
  const int64_t group, last;
  int64_t g = 0, left;
  Meaning<HAS> meaning;
  __m512i order;  // of results: output by output, from column by column
  Unpacking(const Tiled& w, const uint8_t* codes, const TileGroups& groups)
      : codes(codes), groups(groups), table(code_table(w)), group(w.group), last(w.groups() - 1), left(w.group), meaning(groups, 0) {
    for (int i = 0; i < 16; i++) ((uint16_t*)&order)[2 * i] = (uint16_t)i, ((uint16_t*)&order)[2 * i + 1] = (uint16_t)(16 + i);
  }
  inline void pair(vf a, vf b, bf16* to) const {
    const __m512i columns = (__m512i)_mm512_cvtne2ps_pbh((__m512)meaning.of(b), (__m512)meaning.of(a));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, columns));
  }
  __attribute__((always_inline)) inline void step(bf16* to) {
    if (left == 0) {  // what is behind the last column counts to its group
      if (g < last) meaning = Meaning<HAS>(groups, ++g);
      left = group;
    }
    __builtin_prefetch(codes + 2048);
    const Codes c = BITS == 4 ? Codes{} : step_codes<BITS>(codes);
    pair(column<BITS, 0>(codes, c, table), column<BITS, 1>(codes, c, table), to);
    pair(column<BITS, 2>(codes, c, table), column<BITS, 3>(codes, c, table), to + 2 * LANES);
    pair(column<BITS, 4>(codes, c, table), column<BITS, 5>(codes, c, table), to + 4 * LANES);
    pair(column<BITS, 6>(codes, c, table), column<BITS, 7>(codes, c, table), to + 6 * LANES);
    codes += LANES * BITS;
    left -= STEP;
  }
};
// A whole tile, [padded / 2][16 outputs][2], 0 behind the last column.
template <int BITS, int HAS> void unpack_tile(const Tiled& w, int64_t t, const TileGroups& groups, bf16* to) {
  Unpacking<BITS, HAS> from(w, w.tile_codes(t), groups);
  for (int64_t k = 0; k < w.padded(); k += STEP, to += STEP * LANES) from.step(to);
  to -= (w.padded() - w.depth / 2 * 2) * LANES;
  if (w.depth % 2) {  // the last pair's second column is behind the end
    for (int i = 0; i < LANES; i++) to[2 * i + 1] = bf16{0};
    to += 2 * LANES;
  }
  memset(to, 0, (w.padded() - (w.depth + 1) / 2 * 2) * LANES * sizeof(bf16));
}
inline void unpack_tile(const Tiled& w, int64_t t, const TileGroups& groups, bf16* to) {
  with_bits(w.bits, [&](auto bits) {
    with_parts(w, [&](auto has) { unpack_tile<decltype(bits)::value, decltype(has)::value>(w, t, groups, to); });
  });
}
}  // namespace
#endif
