// Rows of 8-bit inputs: one scale for a row of inputs and one for an output's weights, which are rounded to 8 bits where they
// have not one scale already, so that a product is one of bytes by matrix tiles.
#pragma once
#include "tiles.h"
#include "../amx.h"

#if defined(KC_TILED) && defined(KC_AMX)
namespace {
constexpr float BYTE = 127.f;

// Inputs rounded to bytes [rows rounded up to 16][padded], and each row's scale.
struct ByteRows {
  char* data;
  float* scales;
  int64_t rows, row_bytes;
};
inline int64_t whole_rows(int64_t rows) { return (rows + amx::T - 1) / amx::T * amx::T; }
inline int64_t byte_row_bytes(const Tiled& w, int64_t rows) { return whole_rows(rows) * (w.padded() + (int64_t)sizeof(float)); }
inline ByteRows byte_rows_at(const Tiled& w, int64_t rows, char* to) {
  return {to, (float*)(to + whole_rows(rows) * w.padded()), rows, w.padded()};
}
inline void round_byte_row(const Tiled& w, const bf16* x, const ByteRows& in, int64_t m) {
  char* to = in.data + m * in.row_bytes;
  vf most{};
  bool finite = true;
  for (int64_t k = 0; k < w.depth; k += W) {
    const vf v = load_part(x + k, (int)std::min<int64_t>(W, w.depth - k));
    finite = finite && _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q) == 0;
    most = max((vf)((vu)v & 0x7fffffffu), most);
  }
  const float largest = lanes_max(most), inverse = largest > 0.f ? BYTE / largest : 0.f;
  for (int64_t k = 0; k < w.depth; k += W) {
    const int left = (int)std::min<int64_t>(W, w.depth - k);
    const __m512i n = _mm512_cvtps_epi32((__m512)(load_part(x + k, left) * inverse));
    _mm512_mask_cvtepi32_storeu_epi8(to + k, (__mmask16)((1u << left) - 1), n);
  }
  memset(to + w.depth, 0, in.row_bytes - w.depth);
  if (largest < INFINITY && inverse == INFINITY) memset(to, 0, w.depth);  // too small to be scaled
  in.scales[m] = finite && largest < INFINITY ? largest / BYTE : NAN;
}

// The scale of each output's weights, were they bytes: of the largest that its codes can mean.
template <int HAS> vf output_scales(const Tiled& w, const TileGroups& of) {
  const float top = (float)((1 << w.bits) - 1);
  vf most{};
  for (int64_t g = 0; g < w.groups(); g++) {
    const Meaning<HAS> group(of, g);
    const vf low = group.of(splat(-shared_zero(w))), high = group.of(splat(top - shared_zero(w)));
    most = max((vf)((vu)low & 0x7fffffffu), max((vf)((vu)high & 0x7fffffffu), most));
  }
  return most * splat(1.f / BYTE);
}
// Four columns of each output, of codes a byte each, as bytes.
template <int HAS> KC_INLINE __m512i as_bytes(__m512i four, const Meaning<HAS>& group, float zero, vf inverse) {
  __m512i found = _mm512_setzero_si512();
  const __m512i byte = _mm512_set1_epi32(255);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const vf codes = (vf)_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(four, 8 * i), byte));
    const __m512i n = _mm512_cvtps_epi32((__m512)(group.of(codes - zero) * inverse));
    found = _mm512_or_si512(found, _mm512_slli_epi32(_mm512_and_si512(n, byte), 8 * i));
  }
  return found;
}
// The same without zeros of groups and offsets, in 16-bit integers: (code - zero) * ratio with a ratio of 15 bits.
template <int BITS> KC_INLINE __m512i as_bytes(__m512i four, __m512i zero, __m512i ratio) {
  constexpr int SHIFT = BITS == 8 ? 0 : 9 - BITS;
  const __m512i low = _mm512_set1_epi16(255);
  const __m512i a = _mm512_sub_epi16(_mm512_and_si512(four, low), zero), b = _mm512_sub_epi16(_mm512_srli_epi16(four, 8), zero);
  const __m512i even = _mm512_mulhrs_epi16(_mm512_slli_epi16(a, SHIFT), ratio);
  const __m512i odd = _mm512_mulhrs_epi16(_mm512_slli_epi16(b, SHIFT), ratio);
  return _mm512_or_si512(_mm512_and_si512(even, low), _mm512_slli_epi16(odd, 8));
}
// A tile as right operands of bytes: [padded / 4][16 outputs][4]. Returns the outputs' scales.
template <int BITS, int HAS> vf byte_operands(const Tiled& w, const uint8_t* codes, const TileGroups& of, char* to) {
  const vf scales = output_scales<HAS>(w, of);
  const vf inverse = scales > 0.f ? 1.f / scales : vf{};
  const float zero = shared_zero(w), unit = BITS == 8 ? 32768.f : (float)(1 << (6 + BITS));
  const __m512i zeros = _mm512_set1_epi16((short)w.zero);
  for (int64_t g = 0, k = 0; g < w.groups(); g++) {
    const Meaning<HAS> group(of, g);
    const __m512i r = _mm512_cvtps_epi32((__m512)(group.scale * inverse * unit));
    const __m512i bounded = _mm512_min_epi32(_mm512_max_epi32(r, _mm512_set1_epi32(-32767)), _mm512_set1_epi32(32767));
    const __m512i ratio = _mm512_or_si512(_mm512_and_si512(bounded, _mm512_set1_epi32(65535)), _mm512_slli_epi32(bounded, 16));
    for (const int64_t last = std::min(k + w.group, (w.depth + STEP - 1) / STEP * STEP); k < last;
         k += STEP, codes += 16 * BITS, to += 2 * amx::CHUNK) {
      const Codes c = step_codes<BITS>(codes);
      _mm512_store_si512(to, HAS ? as_bytes<HAS>(c.first, group, zero, inverse) : as_bytes<BITS>(c.first, zeros, ratio));
      _mm512_store_si512(
          to + amx::CHUNK, HAS ? as_bytes<HAS>(c.second, group, zero, inverse) : as_bytes<BITS>(c.second, zeros, ratio));
    }
  }
  memset(to, 0, (w.padded() - (w.depth + STEP - 1) / STEP * STEP) * LANES);  // inputs are 0 behind the end, and these are read
  return scales;
}
inline vf byte_operands(const Tiled& w, int64_t t, const TileGroups& of, char* to) {
  vf scales{};
  with_bits(w.bits, [&](auto bits) {
    with_parts(w, [&](auto has) {
      scales = byte_operands<decltype(bits)::value, decltype(has)::value>(w, w.tile_codes(t), of, to);
    });
  });
  return scales;
}
}  // namespace
#endif
