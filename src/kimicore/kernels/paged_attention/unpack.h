// Rows of a packed block (kv_quantize/layout.py) as numbers: minimum + step * code, fused, then rounded to the cache's type.
#pragma once
#include "../simd.h"

namespace {
KC_INLINE vi code_lanes(const uint8_t* p) {
#if defined(KC_AVX512)
  __m128i b; memcpy(&b, p, sizeof b);
  return (vi)_mm512_cvtepu8_epi32(b);
#elif defined(KC_AVX2)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  typedef uint8_t vb __attribute__((vector_size(W)));
  vb b; memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, vi);
#endif
}
KC_INLINE vf number(vi v) { return __builtin_convertvector(v, vf); }

// One rounding to bfloat16 for whole vectors and parts of them, so that a channel's place does not matter.
template <class T> KC_INLINE void put(T* p, vf v) {
#if defined(__AVX512BF16__) && defined(KC_AVX512)
  if constexpr (std::is_same<T, bf16>::value) {
    const __m256bh h = _mm512_cvtneps_pbh(v);
    memcpy(p, &h, sizeof h);
    return;
  }
#endif
  store(p, v);
}

// The codes of W channels, or of the `left` ones that there are.
template <bool WHOLE> KC_INLINE vi some_codes(const uint8_t* p, int left) {
  if constexpr (WHOLE) return code_lanes(p);
  uint8_t some[W] = {};
  memcpy(some, p, (size_t)left);
  return code_lanes(some);
}
template <bool WHOLE, class T> KC_INLINE void some_numbers(T* p, vf v, int left) {
  if constexpr (WHOLE) return put(p, v);
  T some[W];
  put(some, v);
  memcpy(p, some, sizeof(T) * (size_t)left);
}

// W vectors of channels, one of each of W tokens; all share the channels' scales.
template <bool WHOLE, int BITS, class T>
KC_INLINE void unpack_channels(const uint8_t* codes, const f16* scales, int dim, int bytes, int d, int left, T* to) {
  const vf low = load_part(scales + d, left), step = load_part(scales + dim + d, left);
  if constexpr (BITS == 8) {
    for (int i = 0; i < W; i++)
      some_numbers<WHOLE>(to + i * dim + d, fma(step, number(some_codes<WHOLE>(codes + i * bytes + d, left)), low), left);
  } else {
    const int half = dim / 2;
    const vf high_low = load_part(scales + half + d, left), high_step = load_part(scales + dim + half + d, left);
    for (int i = 0; i < W; i++) {
      const vi both = some_codes<WHOLE>(codes + i * bytes + d, left);
      some_numbers<WHOLE>(to + i * dim + d, fma(step, number(both & 15), low), left);
      some_numbers<WHOLE>(to + i * dim + half + d, fma(high_step, number(both >> 4), high_low), left);
    }
  }
}
// Codes of the W channels from d on, all in one half of the token.
template <int BITS> KC_INLINE vf codes_at(const uint8_t* token, int half, int d) {
  if constexpr (BITS == 8) return number(code_lanes(token + d));
  return number(d < half ? code_lanes(token + d) & 15 : code_lanes(token + d - half) >> 4);
}
template <class T> KC_INLINE vf rounded(vf v) {
  if constexpr (std::is_same<T, float>::value) return v;
  T some[W];
  put(some, v);
  return load(some);
}
#if defined(__AVX512BF16__) && defined(KC_AVX512)
KC_INLINE __m512i rounded_both(vf first, vf second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }
KC_INLINE vf interleaved(__m512i halves) {  // of the first and the second W values of 16 bits
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (vf)_mm512_permutexvar_epi16(order, halves);
}
#endif
// Packed lanes of W tokens' keys: r[i] holds token i's channels from d on, W of them or W pairs of 16 bits.
template <int BITS, bool PAIRS, class T>
KC_INLINE void key_lanes(const uint8_t* codes, const f16* scales, int dim, int d, vf* r) {
  const int bytes = dim * BITS / 8, half = dim / 2;
  const vf low = load(scales + d), step = load(scales + dim + d);
  if constexpr (PAIRS) {
#if defined(__AVX512BF16__) && defined(KC_AVX512)
    const vf next_low = load(scales + d + W), next_step = load(scales + dim + d + W);
    for (int i = 0; i < W; i++, codes += bytes)
      r[i] = (vf)rounded_both(fma(step, codes_at<BITS>(codes, half, d), low),
                              fma(next_step, codes_at<BITS>(codes, half, d + W), next_low));
#endif
  } else {
    for (int i = 0; i < W; i++, codes += bytes) r[i] = rounded<T>(fma(step, codes_at<BITS>(codes, half, d), low));
  }
}
// W tokens' values as they are packed: rows of W channels, or of W pairs of two tokens' 16 bits. `ahead` is asked for.
template <int BITS, bool PAIRS, class T>
KC_INLINE void value_lanes(const uint8_t* codes, const f16* scales, int dim, float* to, int stride, const char* ahead, size_t hop) {
  const int bytes = dim * BITS / 8, half = dim / 2;
  for (int i = 0; i < W; i += 1 + PAIRS, codes += bytes * (1 + PAIRS), to += stride) {
    const vf low = splat(widen(scales[2 * i])), step = splat(widen(scales[2 * i + 1]));
    const vf next_low = splat(widen(scales[2 * i + 2 * PAIRS])), next_step = splat(widen(scales[2 * i + 1 + 2 * PAIRS]));
    for (int d = 0; d < dim; d += W, ahead += hop) {
      __builtin_prefetch(ahead, 0, 2);
      const vf v = fma(step, codes_at<BITS>(codes, half, d), low);
      if constexpr (PAIRS) {
#if defined(__AVX512BF16__) && defined(KC_AVX512)
        store(to + d, interleaved(rounded_both(v, fma(next_step, codes_at<BITS>(codes + bytes, half, d), next_low))));
#endif
      } else {
        store(to + d, rounded<T>(v));
      }
    }
  }
}

// W tokens' keys [W][dim]; scales: a minimum for every channel, then a step for every channel.
template <int BITS, class T> void unpack_keys(const uint8_t* codes, const f16* scales, int dim, T* to) {
  const int bytes = dim * BITS / 8;
  int d = 0;
  for (; d + W <= bytes; d += W) unpack_channels<true, BITS>(codes, scales, dim, bytes, d, W, to);
  if (d < bytes) unpack_channels<false, BITS>(codes, scales, dim, bytes, d, bytes - d, to);
}

template <bool WHOLE, int BITS, class T>
KC_INLINE void unpack_token(const uint8_t* codes, vf low, vf step, int dim, int d, int left, T* to) {
  const vi both = some_codes<WHOLE>(codes + d, left);
  if constexpr (BITS == 8) {
    some_numbers<WHOLE>(to + d, fma(step, number(both), low), left);
  } else {
    some_numbers<WHOLE>(to + d, fma(step, number(both & 15), low), left);
    some_numbers<WHOLE>(to + dim / 2 + d, fma(step, number(both >> 4), low), left);
  }
}
// W tokens' values [W][dim]; scales: a minimum and a step for every token.
template <int BITS, class T> void unpack_values(const uint8_t* codes, const f16* scales, int dim, T* to) {
  const int bytes = dim * BITS / 8;
  for (int i = 0; i < W; i++, codes += bytes, to += dim) {
    const vf low = splat(widen(scales[2 * i])), step = splat(widen(scales[2 * i + 1]));
    int d = 0;
    for (; d + W <= bytes; d += W) unpack_token<true, BITS>(codes, low, step, dim, d, W, to);
    if (d < bytes) unpack_token<false, BITS>(codes, low, step, dim, d, bytes - d, to);
  }
}
}  // namespace
