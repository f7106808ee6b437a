// Where products are of bfloat16: weights from scores, and products by matrix tiles (Intel AMX). See parts.h.
#pragma once
#include "../amx.h"
#include "call.h"

namespace {
constexpr int SPLIT = 256;  // keys that share one maximum
constexpr int SUB = 64;     // keys packed at a time
constexpr int MATRIX_ROWS = 16, KEYS_TILE = 32;  // of a matrix tile: query rows; keys, and elements of a head

#if defined(KC_BF16_DOT)
// 2 to the x, which is at most about 0, to 3e-6 of itself: 0 below -150.
KC_INLINE vf power(vf x) {
  const vf magic = splat(12582912.f), y = max(splat(-200.f), x), n = (y + magic) - magic, f = y - n;
  vf p = fma(splat(9.58283011e-3f), f, splat(5.59063997e-2f));
  p = fma(p, f, splat(2.40240988e-1f));
  p = fma(p, f, splat(6.93124196e-1f));
  p = fma(p, f, splat(1.f));
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
}
// Scores s[SPLIT] of one query in keys [low, high) of a part become weights in bfloat16, zero elsewhere in [from, to), 32 at a
// time; with their largest, scaled, and the sum of weights. Returns whether the largest is a number; if not, nothing is done.
inline bool weigh_halves(float* s, float scale, int low, int high, int from, int to, float& part_max, float& part_sum) {
  const auto score = [&](int j) {
    const vf v = load(s + j);
    if (j >= low && j + W <= high) return v;
    const vi key = iota() + j;
    return (key >= low) & (key < high) ? v : splat(-INFINITY);
  };
  vf top = splat(-INFINITY);
  for (int j = from; j < to; j += W) top = max(score(j), top);
  const float highest = lanes_max(top), factor = scale * 1.44269504088896341f;
  if (!(highest > -INFINITY && highest < INFINITY)) return false;
  const vf shift = splat(-highest * factor);
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  __m512 sum = _mm512_setzero_ps();
  for (int j = from; j < to; j += 2 * W) {
    const vf a = power(fma(score(j), splat(factor), shift)), b = power(fma(score(j + W), splat(factor), shift));
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    _mm512_store_si512((bf16*)s + j, (__m512i)both);
    sum = _mm512_dpbf16_ps(sum, both, ones);  // of the rounded weights, so that they add up to one
  }
  part_max = highest * scale;
  part_sum = lanes_sum((vf)sum);
  return true;
}
#endif

#if defined(KC_AMX) && defined(KC_BF16_DOT)
// scores[16][64] = q * keys for the keys [low, high) of the SUB packed ones, in whole tiles.
inline void matrix_scores(const uint32_t* q, const uint32_t* keys, int low, int high, int padded, int depth, float* scores) {
  const int row = padded * 4, keys_row = SUB * 4, scores_row = SPLIT * 4;
  for (int j = 0; j < SUB; j += 2 * W) {
    if (j + 2 * W <= low || j >= high) continue;
    _tile_zero(0);
    _tile_zero(1);
    for (int d = 0; d < depth; d += W) {
      _tile_loadd(4, q + d, row);
      _tile_loadd(6, keys + (size_t)d * SUB + j, keys_row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, keys + (size_t)d * SUB + j + W, keys_row);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, scores + j, scores_row);
    _tile_stored(1, scores + j + W, scores_row);
  }
}
// part[16][padded] += weights[16][low, high) * values, 32 keys at a time.
inline void matrix_mix(const uint32_t* weights, const uint32_t* values, int low, int high, int padded, float* part) {
  const int row = padded * 4, weights_row = SPLIT * 4;
  for (int d = 0; d < padded; d += 2 * W) {
    _tile_loadd(0, part + d, row);
    _tile_loadd(1, part + d + W, row);
    for (int k = low / 2; k < high / 2; k += W) {
      _tile_loadd(4, weights + k, weights_row);
      _tile_loadd(6, values + (size_t)k * padded + d, row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, values + (size_t)k * padded + d + W, row);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, part + d, row);
    _tile_stored(1, part + d + W, row);
  }
}
#endif
}  // namespace
