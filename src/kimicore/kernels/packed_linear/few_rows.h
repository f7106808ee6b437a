// Few rows by tiles of codes: inputs are rounded to integers of 16 bits, and sums over a block of columns are exact.
//
// An input is x = scale * (256 * high + low) with one scale for a block of its row, so that a block's sum is two dot products
// of bytes, whose order does not matter; blocks are added up in their order. A row's results have the same bits in every batch.
// Beside an input that is some ten thousand times the others of its block, these lose what bfloat16 would have kept of them.
#pragma once
#include "tiles.h"

#if defined(KC_TILED)
namespace {
constexpr float LARGEST = 32512.f;  // 127 * 256: the high byte of the largest input fits
constexpr int MOST = 8;             // rows that pass by at once

// Rows of inputs: bytes [rows][row_bytes] each, and per block [rows][blocks] its scale, its sum in float32, scale included, and
// its sum of integers times the zero that all codes have, or where groups have their own, times 1; negative.
struct Inputs {
  int8_t *high, *low;
  float *scales, *sums;
  int32_t* fixed;
  int64_t rows, row_bytes, blocks;
};
// Whole blocks, and an odd number of cache lines: the same columns of all rows are in one cache together.
inline int64_t input_row_bytes(const Tiled& w) { return (std::max(w.blocks() * w.block, w.padded()) + 63) / 64 * 64 / 128 * 128 + 64; }
inline int64_t input_bytes(const Tiled& w, int64_t rows) {
  const int64_t over = rows / 16 + 1;  // tiles of rows reach over the end, by less than a row for each
  return (2 * rows + over) * input_row_bytes(w) + 12 * rows * w.blocks();
}
inline Inputs inputs_at(const Tiled& w, int64_t rows, char* to) {
  const int64_t bytes = rows * input_row_bytes(w), count = rows * w.blocks();
  float* floats = (float*)(to + 2 * bytes);
  return {(int8_t*)to, (int8_t*)to + bytes, floats, floats + count, (int32_t*)(floats + 2 * count), rows, input_row_bytes(w), w.blocks()};
}
inline void round_block(const Tiled& w, const bf16* x, int64_t count, const Inputs& in, int64_t row, int64_t block, int64_t first) {
  vf most{};
  for (int64_t k = 0; k < count; k += W) {
    const vf v = load_part(x + k, (int)std::min<int64_t>(W, count - k));
    most = max((vf)((vu)v & 0x7fffffffu), most);  // a NaN stays out, and comes in by its scale below
  }
  const float largest = lanes_max(most);
  const float inverse = largest > 0.f ? LARGEST / largest : 0.f;
  vi high_sum{}, low_sum{};
  bool finite = largest < INFINITY && inverse < INFINITY;
  for (int64_t k = 0; k < count; k += W) {
    const int left = (int)std::min<int64_t>(W, count - k);
    const vf v = load_part(x + k, left);
    finite = finite && _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q) == 0;
    const vi n = (vi)_mm512_cvtps_epi32((__m512)(v * inverse));
    const vi high = (n + 128) >> 8, low = n - (high << 8);
    high_sum += high;
    low_sum += low;
    const __mmask16 mask = (__mmask16)((1u << left) - 1);
    _mm512_mask_cvtepi32_storeu_epi8(in.high + row * in.row_bytes + first + k, mask, (__m512i)high);
    _mm512_mask_cvtepi32_storeu_epi8(in.low + row * in.row_bytes + first + k, mask, (__m512i)low);
  }
  const int64_t at = row * in.blocks + block;
  const int32_t sum = _mm512_reduce_add_epi32((__m512i)(high_sum * 256 + low_sum));
  in.fixed[at] = sum * (w.zeros ? -1 : -(int32_t)w.zero);
  // Of inputs that are too small to be scaled, the block counts as 0; of such that are not finite, no result is a number.
  in.scales[at] = finite ? largest / LARGEST : largest < INFINITY && inverse == INFINITY ? 0.f : NAN;
  in.sums[at] = in.scales[at] * (float)sum;
}
inline void round_row(const Tiled& w, const bf16* x, const Inputs& in, int64_t row) {
  memset(in.high + row * in.row_bytes + w.depth, 0, in.row_bytes - w.depth);
  memset(in.low + row * in.row_bytes + w.depth, 0, in.row_bytes - w.depth);
  for (int64_t b = 0; b < in.blocks; b++)
    round_block(w, x + b * w.block, std::min(w.block, w.depth - b * w.block), in, row, b, b * w.block);
}

// What a group's codes mean in a tile.
struct BlockScales {
  vf scales, offsets;
  __m512i zeros;
};
template <int HAS> KC_INLINE BlockScales block_scales(const TileGroups& groups, int64_t g) {
  BlockScales found{load(groups.scales + g * LANES), vf{}, __m512i{}};
  if (HAS & OFFSETS) found.offsets = load(groups.offsets + g * LANES);
  if (HAS & ZEROS) found.zeros = _mm512_cvtps_epi32((__m512)load(groups.zeros + g * LANES));
  return found;
}
// Adds a row's block to its total: the integers' sum is exact, and is rounded to float32 once.
template <int HAS>
KC_INLINE vf add_block(__m512i high, __m512i low, const BlockScales& of, const Inputs& in, int64_t row, int64_t block, vf total) {
  const int64_t at = row * in.blocks + block;
  __m512i fixed = _mm512_set1_epi32(in.fixed[at]);
  if (HAS & ZEROS) fixed = _mm512_mullo_epi32(fixed, of.zeros);
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low), fixed);
  total = fma((vf)_mm512_cvtepi32_ps(sum), of.scales * splat(in.scales[at]), total);
  return HAS & OFFSETS ? fma(of.offsets, splat(in.sums[at]), total) : total;
}

// R rows from m by a tile.
template <int BITS, int HAS, int R>
void tile_rows(const Tiled& w, const uint8_t* codes, const TileGroups& groups, const Inputs& in, int64_t m, vf* sums) {
  constexpr int S = R <= 4 ? 2 : 1;  // sums of the two halves of a step apart, where there is room
  const int8_t *high = in.high + m * in.row_bytes, *low = in.low + m * in.row_bytes;
  const int64_t step = w.step_bytes(), per = w.group == w.depth ? in.blocks : w.group / w.block;
  vf total[R] = {};
  for (int64_t b = 0, k = 0; b < in.blocks; b++) {
    __m512i h[S][R] = {}, l[S][R] = {};
    const int64_t end = std::min(k + w.block, (w.depth + STEP - 1) / STEP * STEP);
    for (; k < end; k += STEP, codes += step) {
      const Codes c = step_codes<BITS>(codes);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const int32_t *a = (const int32_t*)(high + r * in.row_bytes + k), *b = (const int32_t*)(low + r * in.row_bytes + k);
        h[0][r] = _mm512_dpbusd_epi32(h[0][r], c.first, _mm512_set1_epi32(a[0]));
        l[0][r] = _mm512_dpbusd_epi32(l[0][r], c.first, _mm512_set1_epi32(b[0]));
        h[S - 1][r] = _mm512_dpbusd_epi32(h[S - 1][r], c.second, _mm512_set1_epi32(a[1]));
        l[S - 1][r] = _mm512_dpbusd_epi32(l[S - 1][r], c.second, _mm512_set1_epi32(b[1]));
      }
    }
    const BlockScales of = block_scales<HAS>(groups, b / per);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m512i hs = S == 2 ? _mm512_add_epi32(h[0][r], h[S - 1][r]) : h[0][r];
      const __m512i ls = S == 2 ? _mm512_add_epi32(l[0][r], l[S - 1][r]) : l[0][r];
      total[r] = add_block<HAS>(hs, ls, of, in, m + r, b, total[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sums[r] = total[r];
}
template <int BITS, int HAS>
void counted_rows(const Tiled& w, const uint8_t* codes, const TileGroups& g, const Inputs& in, int64_t m, int64_t count, vf* sums) {
  switch (count) {
    case 1: return tile_rows<BITS, HAS, 1>(w, codes, g, in, m, sums);
    case 2: return tile_rows<BITS, HAS, 2>(w, codes, g, in, m, sums);
    case 3: return tile_rows<BITS, HAS, 3>(w, codes, g, in, m, sums);
    case 4: return tile_rows<BITS, HAS, 4>(w, codes, g, in, m, sums);
    case 5: return tile_rows<BITS, HAS, 5>(w, codes, g, in, m, sums);
    case 6: return tile_rows<BITS, HAS, 6>(w, codes, g, in, m, sums);
    case 7: return tile_rows<BITS, HAS, 7>(w, codes, g, in, m, sums);
    default: return tile_rows<BITS, HAS, 8>(w, codes, g, in, m, sums);
  }
}
// All rows by a tile; put(row, 16 results).
template <class Put> void few_rows(const Tiled& w, int64_t t, const TileGroups& groups, const Inputs& in, Put&& put) {
  const int64_t pieces = (in.rows + MOST - 1) / MOST;
  for (int64_t p = 0; p < pieces; p++) {
    const int64_t m = in.rows * p / pieces, count = in.rows * (p + 1) / pieces - m;
    vf sums[MOST];
    with_bits(w.bits, [&](auto bits) {
      with_parts(w, [&](auto has) {
        counted_rows<decltype(bits)::value, decltype(has)::value>(w, w.tile_codes(t), groups, in, m, count, sums);
      });
    });
    for (int64_t r = 0; r < count; r++) put(m + r, sums[r]);
  }
}
}  // namespace
#endif
