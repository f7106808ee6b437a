// Packed planes: the common values of a plane as codes of few bits, the others behind them; decoded 64 at a time.
//
// A plane is cut into chunks of CHUNK bytes, the last one shorter, and each is one layer. A layer of n values is
//   1 byte   width: 0 to 6 bits, or 8: the n values follow as they are, and nothing else
//   2 bytes  escapes: how many of the n are not in the table (little-endian)
//   table    2^width values; one less where there are escapes, whose code is the highest
//   codes    n times width bits, from the lowest bit of the first byte on, filled up to a whole byte
//   and where there are escapes a layer of their values, in order; at most LAYERS lie in each other.
// So eight codes always begin on a byte, and no code depends on the one before it, as those of Huffman do.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__AVX512VBMI2__) || defined(__BMI2__)
#include <immintrin.h>
#endif

namespace packed {
constexpr int64_t CHUNK = 4096;
constexpr int LAYERS = 4, WIDEST = 6, RAW = 8, HEAD = 3;
constexpr int64_t ROOM = CHUNK + 64;  // of a buffer: whole vectors are read and written

inline int64_t code_bytes(int64_t n, int width) { return (n * width + 7) / 8; }

// ---------------------------------------------------------------- decoding

#if defined(__AVX512VBMI2__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512F__)
// n codes -> out; whose code is `escape` (-1: none) is the next of `rest`. Returns how many of those there were.
inline int64_t look_up(const uint8_t* codes, int64_t n, int width, const uint8_t* table, int escape, const uint8_t* rest,
                       uint8_t* out) {
  alignas(64) uint8_t spread[64], shifts[64];
  for (int i = 0; i < 64; i++) spread[i] = (uint8_t)((i / 8 * width + i % 8) & 63), shifts[i] = (uint8_t)(i % 8 * width);
  const __m512i places = _mm512_load_si512(spread), by = _mm512_load_si512(shifts);
  const __m512i values = _mm512_loadu_si512(table), low = _mm512_set1_epi8((char)((1 << width) - 1));
  const __m512i marker = _mm512_set1_epi8((char)escape);
  const int64_t step = 8 * width;
  int64_t left = code_bytes(n, width), met = 0;
  for (int64_t i = 0; i < n; i += 64, codes += step, left -= step) {
    const __mmask64 here = left >= step ? (1ull << step) - 1 : (1ull << left) - 1;
    const __m512i bits = _mm512_permutexvar_epi8(places, _mm512_maskz_loadu_epi8(here, codes));
    const __m512i code = _mm512_and_si512(_mm512_multishift_epi64_epi8(by, bits), low);
    __m512i found = _mm512_permutexvar_epi8(code, values);
    if (escape >= 0) {
      __mmask64 other = _mm512_cmpeq_epi8_mask(code, marker);
      if (n - i < 64) other &= (1ull << (n - i)) - 1;
      found = _mm512_mask_expand_epi8(found, other, _mm512_loadu_si512(rest + met));
      met += __builtin_popcountll(other);
    }
    _mm512_storeu_si512(out + i, found);
  }
  return met;
}
#else
inline int64_t look_up(const uint8_t* codes, int64_t n, int width, const uint8_t* table, int escape, const uint8_t* rest,
                       uint8_t* out) {
  const int mask = (1 << width) - 1;
  int64_t left = code_bytes(n, width), met = 0;
  for (int64_t i = 0; i < n; i += 8, codes += width, left -= width) {
    uint64_t bits = 0;
    if (left >= 8) std::memcpy(&bits, codes, 8);
    else std::memcpy(&bits, codes, (size_t)left);
    const int64_t end = std::min<int64_t>(8, n - i);
    for (int64_t j = 0; j < end; j++) {
      const int code = (int)(bits >> (j * width)) & mask;
      const bool other = code == escape;
      out[i + j] = other ? rest[met] : table[code];
      met += other;
    }
  }
  return met;
}
#endif

// Decode one layer of n values into out [ROOM]; return where the input goes on, or null where this cannot be one.
inline const uint8_t* decode(const uint8_t* in, const uint8_t* end, int64_t n, uint8_t* out, int layers = LAYERS) {
  if (end - in < 1) return nullptr;
  const int width = in[0];
  if (width == RAW) {
    if (end - in < 1 + n) return nullptr;
    std::memcpy(out, in + 1, (size_t)n);
    return in + 1 + n;
  }
  if (layers == 1 || width > WIDEST || end - in < HEAD) return nullptr;
  const int64_t escapes = in[1] | in[2] << 8, known = (1 << width) - (escapes ? 1 : 0);
  in += HEAD;
  if (escapes > n || (escapes && !width) || end - in < known + code_bytes(n, width)) return nullptr;
  alignas(64) uint8_t table[64] = {};
  std::memcpy(table, in, (size_t)known);
  const uint8_t *codes = in + known, *after = codes + code_bytes(n, width);
  if (!escapes) {
    if (width) look_up(codes, n, width, table, -1, table, out);
    else std::memset(out, table[0], (size_t)n);
    return after;
  }
  alignas(64) uint8_t rest[ROOM];
  after = decode(after, end, escapes, rest, layers - 1);
  return after && look_up(codes, n, width, table, (int)known, rest, out) == escapes ? after : nullptr;
}

// ---------------------------------------------------------------- encoding

// The values of a chunk, most frequent first, and how many of its bytes have this value or a later one.
struct Ranked {
  uint8_t value[256];
  int64_t from[257];
  int distinct = 0;

  Ranked(const uint8_t* values, int64_t n) {
    uint32_t seen[4][256] = {}, order[256];  // four tables: a byte that repeats does not wait for its own count
    for (int64_t i = 0; i < n; i++) seen[i & 3][values[i]]++;
    for (int v = 0; v < 256; v++)
      if (const uint32_t count = seen[0][v] + seen[1][v] + seen[2][v] + seen[3][v])
        order[distinct++] = count << 8 | (uint32_t)(255 - v);
    std::sort(order, order + distinct, [](uint32_t a, uint32_t b) { return a > b; });
    from[distinct] = 0;
    for (int i = distinct - 1; i >= 0; i--) {
      from[i] = from[i + 1] + (order[i] >> 8);
      value[i] = (uint8_t)(255 - (order[i] & 255));
    }
  }
};

// The fewest bytes of a layer of the values from rank `first` on, and its width; of equal ones the narrowest, raw first.
inline int64_t cheapest(const Ranked& ranked, int first, int layers, int* width) {
  const int64_t n = ranked.from[first];
  int64_t least = 1 + n;
  *width = RAW;
  for (int w = 0; w <= WIDEST && layers > 1; w++) {
    const int held = 1 << w, left = ranked.distinct - first;
    int64_t size = HEAD + held + code_bytes(n, w);
    if (left > held) {
      int below;
      if (!w || size - 1 >= least) continue;
      size += cheapest(ranked, first + held - 1, layers - 1, &below) - 1;
    }
    if (size < least) least = size, *width = w;
  }
  return least;
}

// Eight codes, one per byte, side by side.
inline uint64_t narrowed(const uint8_t* codes, int width) {
#ifdef __BMI2__
  uint64_t bytes;
  std::memcpy(&bytes, codes, 8);
  return _pext_u64(bytes, 0x0101010101010101ull * ((1ull << width) - 1));
#else
  uint64_t bits = 0;
  for (int j = 0; j < 8; j++) bits |= (uint64_t)codes[j] << (j * width);
  return bits;
#endif
}

// Encode one layer; return where the output ends, behind which up to 8 bytes more are written over.
inline uint8_t* encode(const Ranked& ranked, int first, const uint8_t* values, int64_t n, uint8_t* out, int layers) {
  int width;
  cheapest(ranked, first, layers, &width);
  *out++ = (uint8_t)width;
  if (width == RAW) return (uint8_t*)std::memcpy(out, values, (size_t)n) + n;
  const int held = 1 << width, left = ranked.distinct - first;
  const int known = left > held ? held - 1 : held;
  const int64_t escapes = left > held ? ranked.from[first + known] : 0;
  *out++ = (uint8_t)escapes, *out++ = (uint8_t)(escapes >> 8);
  uint8_t code_of[256];
  std::memset(code_of, known, sizeof code_of);  // whatever is not in the table is an escape
  for (int i = 0; i < known; i++) {
    *out++ = i < left ? ranked.value[first + i] : 0;
    if (i < left) code_of[ranked.value[first + i]] = (uint8_t)i;
  }
  uint8_t rest[CHUNK + 1], codes[CHUNK + 8] = {};
  int64_t met = 0;
  for (int64_t i = 0; i < n; i++) {
    codes[i] = code_of[values[i]];
    rest[met] = values[i];
    met += codes[i] == known;
  }
  for (int64_t i = 0; i < n; i += 8) {
    const uint64_t bits = narrowed(codes + i, width);
    const int64_t size = code_bytes(std::min<int64_t>(8, n - i), width);
    std::memcpy(out, &bits, 8);
    out += size;
  }
  return escapes ? encode(ranked, first + known, rest, escapes, out, layers - 1) : out;
}
}  // namespace packed
