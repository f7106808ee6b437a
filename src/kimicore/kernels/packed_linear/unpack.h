// Rows of a weight of 4 to 8 bits as numbers of a type; see layout.py for how they lie and what they mean.
#pragma once
#include <algorithm>
#include "../simd.h"

namespace {
constexpr int64_t ELEMENTS = 64;  // of a chunk
enum ValueType { FLOAT32, BFLOAT16, FLOAT16, INT8, UINT8 };

// Scales or offsets [outs, groups], perhaps multiplied with super [outs, runs] of the run that the group is in.
struct Values {
  const void *data, *super;
  int64_t type, super_type, runs;
};
struct Packed {
  const uint8_t *codes, *zeros;
  Values scales, offsets;  // offsets.data may be null
  int64_t outs, depth, bits, group, zero;
  int64_t groups() const { return (depth + group - 1) / group; }
  int64_t padded() const { return (depth + ELEMENTS - 1) / ELEMENTS * ELEMENTS; }
  int64_t row_bytes() const { return padded() * bits / 8; }
};

template <class T> KC_INLINE void widened(const void* data, int64_t count, float* to) {
  const T* from = (const T*)data;
  int64_t i = 0;
  if constexpr (sizeof(T) > 1)
    for (; i + W <= count; i += W) store(to + i, load(from + i));
  for (; i < count; i++)
    if constexpr (sizeof(T) > 1) to[i] = widen(from[i]);
    else to[i] = (float)from[i];
}
KC_INLINE void read_floats(const void* data, int64_t type, int64_t from, int64_t count, float* to) {
  switch (type) {
    case FLOAT32: return widened<float>((const float*)data + from, count, to);
    case BFLOAT16: return widened<bf16>((const bf16*)data + from, count, to);
    case FLOAT16: return widened<f16>((const f16*)data + from, count, to);
    case INT8: return widened<int8_t>((const int8_t*)data + from, count, to);
    default: return widened<uint8_t>((const uint8_t*)data + from, count, to);
  }
}
inline void read_values(const Values& v, int64_t row, int64_t groups, float* to) {
  read_floats(v.data, v.type, row * groups, groups, to);
  if (!v.super) return;
  const int64_t per = groups / v.runs;
  for (int64_t r = 0; r < v.runs; r++) {
    float super;
    read_floats(v.super, v.super_type, row * v.runs + r, 1, &super);
    for (int64_t g = r * per; g < (r + 1) * per; g++) to[g] = to[g] * super;
  }
}
// A row's scales, zeros and offsets, a float per group; what the weight has not of them is not there.
struct Groups {
  float *scales, *zeros, *offsets;
};
inline int64_t group_floats(const Packed& p) { return 3 * p.groups(); }
inline Groups read_groups(const Packed& p, int64_t row, float* to) {
  const int64_t groups = p.groups();
  const Groups found{to, to + groups, to + 2 * groups};
  read_values(p.scales, row, groups, found.scales);
  if (p.zeros) widened<uint8_t>(p.zeros + row * groups, groups, found.zeros);
  if (p.offsets.data) read_values(p.offsets, row, groups, found.offsets);
  return found;
}

// Codes of a chunk, a byte each.
KC_INLINE void read_codes(const uint8_t* chunk, int64_t bits, uint8_t* to) {
  if (bits == 8) {
    memcpy(to, chunk, ELEMENTS);
    return;
  }
#if defined(KC_AVX512)
  const __m256i both = _mm256_loadu_si256((const __m256i*)chunk), fifteen = _mm256_set1_epi8(15);
  const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), fifteen);
  __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(both, fifteen)), high, 1);
  for (int64_t bit = 4; bit < bits; bit++) {
    uint64_t plane;
    memcpy(&plane, chunk + 32 + 8 * (bit - 4), 8);
    codes = _mm512_or_si512(codes, _mm512_maskz_set1_epi8((__mmask64)plane, (char)(1 << bit)));
  }
  _mm512_storeu_si512(to, codes);
#else
  for (int i = 0; i < 32; i++) {
    to[i] = chunk[i] & 15;
    to[32 + i] = chunk[i] >> 4;
  }
  for (int64_t bit = 4; bit < bits; bit++)
    for (int i = 0; i < 8; i++) {  // a byte of the plane to 8 bytes that are 0 or 1
      const uint64_t spread = (chunk[32 + 8 * (bit - 4) + i] * 0x0101010101010101u) & 0x8040201008040201u;
      const uint64_t ones = ((spread + 0x7f7f7f7f7f7f7f7fu) | spread) >> 7 & 0x0101010101010101u;
      uint64_t eight;
      memcpy(&eight, to + 8 * i, 8);
      eight |= ones << bit;
      memcpy(to + 8 * i, &eight, 8);
    }
#endif
}
KC_INLINE vf floats(const uint8_t* p) {
#if defined(KC_AVX512)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(KC_AVX2)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = (float)p[i];
  return v;
#endif
}
// What a weight has beside scales.
constexpr int ZEROS = 1, OFFSETS = 2;

// What the codes of group g mean; `zero` is that of all groups.
template <int HAS> KC_INLINE vf meant(vf codes, const Groups& groups, int64_t g, float zero) {
  const vf scaled = (codes - (HAS & ZEROS ? groups.zeros[g] : zero)) * groups.scales[g];
  return HAS & OFFSETS ? scaled + groups.offsets[g] : scaled;
}

// Chunks of some rows: from element k on, which is in group g. A row's codes are code_row bytes after those of the row before,
// and what they mean is written row after row, `apart` numbers from one to the next, in whole chunks.
struct Span {
  const uint8_t* codes;
  int64_t code_row, rows, chunks, k, g, apart;
};
template <int HAS, class T> void unpack_as(const Packed& p, const Span& at, const Groups* of, T* out) {
  const int64_t step = p.bits * (ELEMENTS / 8);
  for (int64_t r = 0; r < at.rows; r++) {
    int64_t g = at.g, end = (g + 1) * p.group, k = at.k;
    T* to = out + r * at.apart;
    for (int64_t c = 0; c < at.chunks; c++) {
      uint8_t wide[ELEMENTS];
      read_codes(at.codes + r * at.code_row + c * step, p.bits, wide);
      for (int i = 0; i < ELEMENTS; i += W, k += W, to += W) {
        if (k >= end && k < p.depth) g++, end += p.group;
        store(to, meant<HAS>(floats(wide + i), of[r], g, (float)p.zero));
      }
    }
  }
}

#if defined(__AVX512BF16__) && defined(KC_AVX512)
KC_INLINE __m512i rounded(vf low, vf high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
// 4 or 5 bits: 32 codes are looked up at once, among the 32 numbers that they mean, which are of 4 bits the same twice. PER
// chunks of a row have one group (0: half a chunk has).
template <int BITS, int HAS, int PER> void look_up(const Packed& p, const Span& at, const Groups* of, bf16* out) {
  const vf low = __builtin_convertvector(iota(), vf), high = BITS == 4 ? low : low + 16.f;
  const __m512i fifteen = _mm512_set1_epi16(15);
  const float zero = (float)p.zero;
  const int64_t last = p.groups() - 1;
  for (int64_t r = 0; r < at.rows; r++) {
    const uint8_t* codes = at.codes + r * at.code_row;
    bf16* to = out + r * at.apart;
    __m512i table = _mm512_setzero_si512();
    const auto next_table = [&](int64_t g) {
      const vf first = meant<HAS>(low, of[r], g, zero);
      table = rounded(first, BITS == 4 ? first : meant<HAS>(high, of[r], g, zero));
    };
    for (int64_t c = 0; c < at.chunks; c++, codes += 8 * BITS, to += ELEMENTS) {
      if (PER && (PER == 1 || (at.k / ELEMENTS + c) % PER == 0 || c == 0)) next_table((at.k / ELEMENTS + c) / PER);
      __m512i places[2];
      places[0] = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)codes));
      places[1] = _mm512_srli_epi16(places[0], 4);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        if (!PER) next_table(std::min(at.k / 32 + 2 * c + half, last));
        __m512i place = places[half];  // a lookup takes the lowest 5 bits
        if (BITS == 5) {
          uint32_t plane;
          memcpy(&plane, codes + 32 + 4 * half, 4);
          place = _mm512_or_si512(_mm512_and_si512(place, fifteen), _mm512_maskz_set1_epi16((__mmask32)plane, 16));
        }
        _mm512_storeu_si512(to + 32 * half, _mm512_permutexvar_epi16(place, table));
      }
    }
  }
}
template <int BITS, int HAS> bool looked_up(const Packed& p, const Span& at, const Groups* of, bf16* out) {
  switch (p.group) {
    case 32: return look_up<BITS, HAS, 0>(p, at, of, out), true;
    case 64: return look_up<BITS, HAS, 1>(p, at, of, out), true;
    case 128: return look_up<BITS, HAS, 2>(p, at, of, out), true;
    default: return false;
  }
}
// Anything else: computed, 32 at once.
template <int HAS> void compute(const Packed& p, const Span& at, const Groups* of, bf16* out) {
  const int64_t step = p.bits * (ELEMENTS / 8);
  const float zero = (float)p.zero;
  for (int64_t r = 0; r < at.rows; r++) {
    int64_t g = at.g, end = (g + 1) * p.group, k = at.k;
    bf16* to = out + r * at.apart;
    const uint8_t* codes = at.codes + r * at.code_row;
    for (int64_t c = 0; c < at.chunks; c++, codes += step) {
      uint8_t wide[ELEMENTS];
      if (p.bits != 8) read_codes(codes, p.bits, wide);
      const uint8_t* bytes = p.bits == 8 ? codes : wide;
#pragma GCC unroll 2
      for (int i = 0; i < ELEMENTS; i += 2 * W, to += 2 * W) {
        vf v[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++, k += W) {
          if (k >= end && k < p.depth) g++, end += p.group;
          v[half] = meant<HAS>(floats(bytes + i + half * W), of[r], g, zero);
        }
        _mm512_storeu_si512(to, rounded(v[0], v[1]));
      }
    }
  }
}
template <int HAS> void unpack_as(const Packed& p, const Span& at, const Groups* of, bf16* out) {
  if (p.bits == 4 && looked_up<4, HAS>(p, at, of, out)) return;
  if (p.bits == 5 && looked_up<5, HAS>(p, at, of, out)) return;
  compute<HAS>(p, at, of, out);
}
#endif

template <class T> KC_INLINE void unpack_span(const Packed& p, const Span& at, const Groups* of, T* out) {
  switch ((p.zeros ? ZEROS : 0) | (p.offsets.data ? OFFSETS : 0)) {
    case 0: return unpack_as<0>(p, at, of, out);
    case ZEROS: return unpack_as<ZEROS>(p, at, of, out);
    case OFFSETS: return unpack_as<OFFSETS>(p, at, of, out);
    default: return unpack_as<ZEROS | OFFSETS>(p, at, of, out);
  }
}
// One row, padded() numbers with 0 behind its end; `groups` has room for group_floats().
template <class T> void unpack_row(const Packed& p, int64_t row, float* groups, T* to) {
  const Groups of = read_groups(p, row, groups);
  unpack_span(p, {p.codes + row * p.row_bytes(), 0, 1, p.padded() / ELEMENTS, 0, 0, 0}, &of, to);
  memset(to + p.depth, 0, (p.padded() - p.depth) * sizeof(T));
}
// `outs` rows from `first`, padded() apart.
template <class T> void unpack_rows(const Packed& p, int64_t first, int64_t outs, float* groups, T* to) {
  for (int64_t i = 0; i < outs; i++) unpack_row(p, first + i, groups, to + i * p.padded());
}
}  // namespace
