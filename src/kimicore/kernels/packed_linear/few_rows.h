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

// Rows of inputs: bytes [rows][padded] each, and per block its scale and sums [rows][blocks].
struct Inputs {
  int8_t *high, *low;
  float *scales, *sums;  // the sum in float32, scale included
  int32_t *high_sums, *low_sums;
  int64_t rows, padded, blocks;
};
inline int64_t input_bytes(const Tiled& w, int64_t rows) { return rows * (2 * w.padded() + 16 * w.blocks()); }
inline Inputs inputs_at(const Tiled& w, int64_t rows, char* to) {
  const int64_t padded = w.padded(), blocks = w.blocks(), bytes = rows * padded, count = rows * blocks;
  float* floats = (float*)(to + 2 * bytes);
  int32_t* sums = (int32_t*)(floats + 2 * count);
  return {(int8_t*)to, (int8_t*)to + bytes, floats, floats + count, sums, sums + count, rows, padded, blocks};
}
inline void round_block(const bf16* x, int64_t count, const Inputs& in, int64_t row, int64_t block, int64_t first) {
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
    _mm512_mask_cvtepi32_storeu_epi8(in.high + row * in.padded + first + k, mask, (__m512i)high);
    _mm512_mask_cvtepi32_storeu_epi8(in.low + row * in.padded + first + k, mask, (__m512i)low);
  }
  const int64_t at = row * in.blocks + block;
  in.high_sums[at] = _mm512_reduce_add_epi32((__m512i)high_sum);
  in.low_sums[at] = _mm512_reduce_add_epi32((__m512i)low_sum);
  // Of inputs that are too small to be scaled, the block counts as 0; of such that are not finite, no result is a number.
  in.scales[at] = finite ? largest / LARGEST : largest < INFINITY && inverse == INFINITY ? 0.f : NAN;
  in.sums[at] = in.scales[at] * fmaf((float)in.high_sums[at], 256.f, (float)in.low_sums[at]);
}
inline void round_row(const Tiled& w, const bf16* x, const Inputs& in, int64_t row) {
  memset(in.high + row * in.padded + w.depth, 0, in.padded - w.depth);
  memset(in.low + row * in.padded + w.depth, 0, in.padded - w.depth);
  for (int64_t b = 0; b < in.blocks; b++)
    round_block(x + b * w.block, std::min(w.block, w.depth - b * w.block), in, row, b, b * w.block);
}

// R rows from m by a tile.
template <int BITS, int HAS, int R>
void tile_rows(const Tiled& w, const uint8_t* codes, const TileGroups& groups, const Inputs& in, int64_t m, vf* sums) {
  constexpr int S = R <= 4 ? 2 : 1;  // sums of the two halves of a step apart, where there is room
  const int8_t *high = in.high + m * in.padded, *low = in.low + m * in.padded;
  const int64_t step = w.step_bytes(), per = w.group == w.depth ? in.blocks : w.group / w.block;
  vf total[R] = {};
  for (int64_t b = 0, k = 0, g = 0, left = per; b < in.blocks; b++) {
    __m512i h[S][R], l[S][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const int64_t at = (m + r) * in.blocks + b;
      if (HAS & ZEROS) {
        const __m512i zeros = _mm512_cvtps_epi32((__m512)load(groups.zeros + g * LANES));
        h[0][r] = _mm512_mullo_epi32(zeros, _mm512_set1_epi32(-in.high_sums[at]));
        l[0][r] = _mm512_mullo_epi32(zeros, _mm512_set1_epi32(-in.low_sums[at]));
      } else {
        h[0][r] = _mm512_set1_epi32(-(int32_t)w.zero * in.high_sums[at]);
        l[0][r] = _mm512_set1_epi32(-(int32_t)w.zero * in.low_sums[at]);
      }
      if (S == 2) h[S - 1][r] = l[S - 1][r] = _mm512_setzero_si512();
    }
    const int64_t end = std::min(k + w.block, (w.depth + STEP - 1) / STEP * STEP);
    for (; k < end; k += STEP, codes += step) {
      const Codes c = step_codes<BITS>(codes);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const int32_t *a = (const int32_t*)(high + r * in.padded + k), *b = (const int32_t*)(low + r * in.padded + k);
        h[0][r] = _mm512_dpbusd_epi32(h[0][r], c.first, _mm512_set1_epi32(a[0]));
        l[0][r] = _mm512_dpbusd_epi32(l[0][r], c.first, _mm512_set1_epi32(b[0]));
        h[S - 1][r] = _mm512_dpbusd_epi32(h[S - 1][r], c.second, _mm512_set1_epi32(a[1]));
        l[S - 1][r] = _mm512_dpbusd_epi32(l[S - 1][r], c.second, _mm512_set1_epi32(b[1]));
      }
    }
    const vf scales = load(groups.scales + g * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const int64_t at = (m + r) * in.blocks + b;
      const __m512i hs = S == 2 ? _mm512_add_epi32(h[0][r], h[S - 1][r]) : h[0][r];
      const __m512i ls = S == 2 ? _mm512_add_epi32(l[0][r], l[S - 1][r]) : l[0][r];
      const vf sum = fma((vf)_mm512_cvtepi32_ps(hs), splat(256.f), (vf)_mm512_cvtepi32_ps(ls));
      total[r] = fma(sum, scales * splat(in.scales[at]), total[r]);
      if (HAS & OFFSETS) total[r] = fma(load(groups.offsets + g * LANES), splat(in.sums[at]), total[r]);
    }
    if (--left == 0) g++, left = per;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sums[r] = total[r];
}
template <int BITS, int HAS>
void some_rows(const Tiled& w, const uint8_t* codes, const TileGroups& g, const Inputs& in, int64_t m, int64_t count, vf* sums) {
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
        some_rows<decltype(bits)::value, decltype(has)::value>(w, w.tile_codes(t), groups, in, m, count, sums);
      });
    });
    for (int64_t r = 0; r < count; r++) put(m + r, sums[r]);
  }
}
}  // namespace
#endif
