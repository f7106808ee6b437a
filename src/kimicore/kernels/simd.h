// Vectors of float32 for the native kernels: GNU vector types (gcc, clang), with fused multiply-add by instruction set.
//
// Everything is compiled with -ffp-contract=off: a multiply and an add are fused exactly where fma() is written, so that two
// instances of one template round alike. That is what makes a result the same in every batch.
#pragma once
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define KC_AVX512 1
constexpr int W = 16;         // lanes
constexpr int TILE_VECS = 4;  // vectors beside each other in a register tile
constexpr int TILE_ROWS = 6;  // 6 * 4 sums + 4 operands + 1 broadcast fit in 32 registers
#elif defined(__AVX2__) && defined(__FMA__)
#define KC_AVX2 1
constexpr int W = 8;
constexpr int TILE_VECS = 2;
constexpr int TILE_ROWS = 6;  // 16 registers
#else
constexpr int W = 4;
constexpr int TILE_VECS = 4;
constexpr int TILE_ROWS = 6;
#endif
#define KC_INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

KC_INLINE vf fma(vf a, vf b, vf c) {
#if defined(KC_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(KC_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
KC_INLINE vf splat(float x) { return x - vf{}; }  // nothing to compute, unlike x + 0, which is +0 for -0
KC_INLINE vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
KC_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
// The second operand where either is not a number, so that max(limit, x) keeps a NaN of x.
KC_INLINE vf max(vf a, vf b) { return a > b ? a : b; }
KC_INLINE vi iota() { vi v; for (int i = 0; i < W; i++) v[i] = i; return v; }

// Sums and maxima over lanes, always in the same order.
KC_INLINE float lanes_sum(vf v) {
#if defined(KC_AVX512)
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
#elif defined(KC_AVX2)
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
#endif
  float t[W];
  store(t, v);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; i++) t[i] += t[i + n];
  return t[0];
}
KC_INLINE float lanes_max(vf v) {
#if defined(KC_AVX2)  // _mm_max_ps, too, gives its second operand where either is not a number
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
#endif
  float t[W];
  store(t, v);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
}

// e^x to about 1 unit in the last place; 0 below -87.3, +inf above 88.7; keeps NaN. Polynomial of Cephes' expf.
KC_INLINE vf exp(vf x) {
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  vf y = max(splat(-87.3f), x);
  y = splat(88.37f) < y ? splat(88.37f) : y;
  vf shifted = fma(y, splat(1.44269504088896341f), magic);
  vf n = shifted - magic;
  vf r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.f;
  vi bits = ((vi)shifted - (vi)magic + 127) << 23;
  p = p * (vf)bits;
  p = splat(88.7f) < x ? splat(INFINITY) : p;
  return x < splat(-87.3f) ? vf{} : p;
}
KC_INLINE vf tanh(vf x) { return 1.f - 2.f / (exp(x + x) + 1.f); }

// 16-bit types: widened exactly, rounded to nearest even.
KC_INLINE float widen(float x) { return x; }
KC_INLINE float widen(bf16 x) { uint32_t u = (uint32_t)x.bits << 16; float f; memcpy(&f, &u, 4); return f; }
KC_INLINE float widen(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, e = (x.bits >> 10) & 31, m = x.bits & 1023;
  if (e == 0) { float f = (float)m * 5.9604644775390625e-8f; return sign ? -f : f; }
  uint32_t u = sign | (e == 31 ? 0x7f800000u : (e + 112) << 23) | m << 13;
  float f; memcpy(&f, &u, 4); return f;
#endif
}
KC_INLINE void narrow(float x, float* p) { *p = x; }
KC_INLINE void narrow(float x, bf16* p) {
  uint32_t u; memcpy(&u, &x, 4);
  p->bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
KC_INLINE void narrow(float x, f16* p) {
#if defined(__F16C__)
  p->bits = (uint16_t)_cvtss_sh(x, 0);
#else
  uint32_t u; memcpy(&u, &x, 4);
  uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) { p->bits = (uint16_t)(sign | 0x7e00); return; }
  if (a >= 0x477ff000) { p->bits = (uint16_t)(sign | 0x7c00); return; }
  if (a < 0x38800000) {  // below the least normal number: add so that the rounding is the adder's
    float f; memcpy(&f, &a, 4); f += 0.5f; memcpy(&a, &f, 4);
    p->bits = (uint16_t)(sign | (a - 0x3f000000)); return;
  }
  p->bits = (uint16_t)(sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13));
#endif
}
KC_INLINE vf load(const bf16* p) {
#if defined(KC_AVX512)
  __m256i h; memcpy(&h, p, sizeof h);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#elif defined(KC_AVX2)
  __m128i h; memcpy(&h, p, sizeof h);
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
#else
  vh h; memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
KC_INLINE void store(bf16* p, vf v) {
  vu u = (vu)v;
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u = v == v ? u : (vu{} + 0x7fc0u);
#if defined(KC_AVX512)
  __m256i h = _mm512_cvtepi32_epi16((__m512i)u);
#elif defined(KC_AVX2)
  __m128i h = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)u), _mm256_extracti128_si256((__m256i)u, 1));
#else
  vh h = __builtin_convertvector(u, vh);
#endif
  memcpy(p, &h, sizeof h);
}
KC_INLINE vf load(const f16* p) {
#if defined(KC_AVX512)
  __m256i h; memcpy(&h, p, sizeof h); return _mm512_cvtph_ps(h);
#elif defined(KC_AVX2) && defined(__F16C__)
  __m128i h; memcpy(&h, p, sizeof h); return _mm256_cvtph_ps(h);
#else
  vf v; for (int i = 0; i < W; i++) v[i] = widen(p[i]); return v;
#endif
}
KC_INLINE void store(f16* p, vf v) {
#if defined(KC_AVX512)
  __m256i h = _mm512_cvtps_ph(v, 0); memcpy(p, &h, sizeof h);
#elif defined(KC_AVX2) && defined(__F16C__)
  __m128i h = _mm256_cvtps_ph(v, 0); memcpy(p, &h, sizeof h);
#else
  for (int i = 0; i < W; i++) narrow(v[i], p + i);
#endif
}
// The first n lanes (n >= W: all), zeros behind them.
template <class T> KC_INLINE vf load_part(const T* p, int n) {
  if (n >= W) return load(p);
#if defined(KC_AVX512)
  const __mmask16 mask = (__mmask16)((1u << n) - 1);
  if constexpr (std::is_same<T, float>::value) return _mm512_maskz_loadu_ps(mask, p);
  __m256i half = _mm256_maskz_loadu_epi16(mask, p);
  if constexpr (std::is_same<T, bf16>::value) return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
  if constexpr (std::is_same<T, f16>::value) return _mm512_cvtph_ps(half);
#endif
  vf v{};
  for (int i = 0; i < n; i++) v[i] = widen(p[i]);
  return v;
}
template <class T> KC_INLINE void store_part(T* p, vf v, int n) {
  if (n >= W) return store(p, v);
  T whole[W];
  store(whole, v);
  memcpy(p, whole, sizeof(T) * n);
}

// Swap rows and columns of W vectors of W 32-bit lanes.
KC_INLINE void transpose(vf* r) {
#if defined(KC_AVX512)
  __m512d t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = (__m512d)_mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = (__m512d)_mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = (vf)_mm512_unpacklo_pd(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = (vf)_mm512_unpackhi_pd(t[i + j], t[i + j + 2]);
    }
  vf s[16];
  for (int i = 0; i < 4; i++) {
    s[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    s[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    s[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    s[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_f32x4(s[i], s[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(s[i], s[i + 8], 0xdd);
  }
#elif defined(KC_AVX2)
  vf t[8], s[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 4
    for (int j = 0; j < 2; j++) {
      s[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      s[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
  }
#else
  vf t[W];
  for (int i = 0; i < W; i++)
    for (int j = 0; j < W; j++) t[j][i] = r[i][j];
  for (int i = 0; i < W; i++) r[i] = t[i];
#endif
}

// Memory that a thread keeps from call to call; null where there is none.
struct Scratch {
  char* data = nullptr;
  size_t bytes = 0;
  char* need(size_t n) {
    if (n > bytes) {
      free(data);
      data = (char*)aligned_alloc(64, (n + 4095) / 4096 * 4096);
      bytes = data ? n : 0;
    }
    return data;
  }
  ~Scratch() { free(data); }
};

// Work shared among the threads of a team (team/team.cpp), whose entry is handed in by address. fn(data) runs on every
// thread; null runs it here alone.
typedef void (*parallel_entry)(void (*fn)(void*), void* data, unsigned threads);
template <class F> KC_INLINE void on_threads(parallel_entry entry, int threads, F&& body) {
  void (*call)(void*) = [](void* data) { (*(typename std::remove_reference<F>::type*)data)(); };
  if (entry && threads > 1) entry(call, (void*)&body, (unsigned)threads);
  else body();
}

// [0, count) in equal ranges, body(first, last) on one after another by whichever thread is free.
template <class F> KC_INLINE void shared_range(parallel_entry entry, int threads, int64_t count, F&& body) {
  if (threads > count) threads = (int)count;
  if (!entry || threads <= 1) return body(0, count);
  const int64_t pieces = count < 4 * (int64_t)threads ? count : 4 * (int64_t)threads;
  std::atomic<int64_t> next{0};
  on_threads(entry, threads, [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;)
      body(count * i / pieces, count * (i + 1) / pieces);
  });
}
