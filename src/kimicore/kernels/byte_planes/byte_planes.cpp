// Byte planes: byte i of every item together, and back, also from packed planes; and how even the bytes of a plane are.
#include "packed.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {
constexpr int64_t LINE = 64, SAMPLE = 16384;  // bytes; see sampled_bits in reference.py

template <int bytes> void split(const uint8_t* __restrict items, uint8_t* __restrict planes, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    for (int b = 0; b < bytes; b++) planes[b * count + i] = items[i * bytes + b];
}

template <int bytes> void join(const uint8_t* const* planes, uint8_t* __restrict items, int64_t count) {
  const uint8_t* __restrict from[bytes];
  for (int b = 0; b < bytes; b++) from[b] = planes[b];
  for (int64_t i = 0; i < count; i++)
    for (int b = 0; b < bytes; b++) items[i * bytes + b] = from[b][i];
}

// Items of 2 bytes go past the cache: a load is larger than it, and a line that is written whole need not be read first.
#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
template <> void join<2>(const uint8_t* const* planes, uint8_t* __restrict items, int64_t count) {
  const uint8_t *low = planes[0], *high = planes[1];
  alignas(64) uint8_t order[128];
  for (int i = 0; i < 128; i++) order[i] = (uint8_t)(i / 2 + i % 2 * 64);
  const __m512i front = _mm512_load_si512(order), back = _mm512_load_si512(order + 64);
  int64_t i = 0;
  const auto one = [&] { items[2 * i] = low[i], items[2 * i + 1] = high[i], i++; };
  while (i < count && ((uintptr_t)(items + 2 * i) & 63)) one();
  for (; i + 64 <= count; i += 64) {
    const __m512i a = _mm512_loadu_si512(low + i), b = _mm512_loadu_si512(high + i);
    _mm512_stream_si512((__m512i*)(items + 2 * i), _mm512_permutex2var_epi8(a, front, b));
    _mm512_stream_si512((__m512i*)(items + 2 * i + 64), _mm512_permutex2var_epi8(a, back, b));
  }
  while (i < count) one();
}
#elif defined(__AVX2__)
template <> void join<2>(const uint8_t* const* planes, uint8_t* __restrict items, int64_t count) {
  const uint8_t *low = planes[0], *high = planes[1];
  int64_t i = 0;
  const auto one = [&] { items[2 * i] = low[i], items[2 * i + 1] = high[i], i++; };
  while (i < count && ((uintptr_t)(items + 2 * i) & 31)) one();
  for (; i + 32 <= count; i += 32) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)(low + i)), b = _mm256_loadu_si256((const __m256i*)(high + i));
    const __m256i even = _mm256_unpacklo_epi8(a, b), odd = _mm256_unpackhi_epi8(a, b);
    _mm256_stream_si256((__m256i*)(items + 2 * i), _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_stream_si256((__m256i*)(items + 2 * i + 32), _mm256_permute2x128_si256(even, odd, 0x31));
  }
  while (i < count) one();
}
#endif

void join_any(const uint8_t* const* planes, uint8_t* items, int64_t count, int item_bytes) {
  if (item_bytes == 4) join<4>(planes, items, count);
  else if (item_bytes == 2) join<2>(planes, items, count);
  else std::memcpy(items, planes[0], (size_t)count);
}

void fence() {  // other threads see the items when they hear of them
#ifdef __AVX2__
  _mm_sfence();
#endif
}
}  // namespace

// items [count * item_bytes] -> planes [item_bytes, count]; item_bytes is 1, 2 or 4, and nothing overlaps.
extern "C" void kimicore_split_planes(const uint8_t* items, uint8_t* planes, int64_t count, int item_bytes) {
  if (item_bytes == 4) split<4>(items, planes, count);
  else if (item_bytes == 2) split<2>(items, planes, count);
  else std::memcpy(planes, items, (size_t)count);
}

// The way back, from planes that may lie apart.
extern "C" void kimicore_join_planes(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, uint8_t* items,
                                     int64_t count, int item_bytes) {
  const uint8_t* const planes[4] = {a, b, c, d};
  join_any(planes, items, count, item_bytes);
  fence();
}

// plane [count] -> out, packed, as packed.h tells; returns its length, or 0 where it takes more than `most` bytes.
extern "C" int64_t kimicore_pack_plane(const uint8_t* plane, int64_t count, uint8_t* out, int64_t most) {
  uint8_t room[packed::CHUNK + 1 + 8];  // no layer is longer than its values as they are
  int64_t size = 0;
  for (int64_t at = 0; at < count; at += packed::CHUNK) {
    const int64_t n = std::min(packed::CHUNK, count - at);
    const int64_t length = packed::encode(packed::Ranked(plane + at, n), 0, plane + at, n, room, packed::LAYERS) - room;
    if (size + length > most) return 0;
    std::memcpy(out + size, room, (size_t)length);
    size += length;
  }
  return size;
}

// Planes one behind the other, of these lengths -> items [count * item_bytes]. One that has `count` bytes lies there as
// it is, a shorter one is packed. Chunk by chunk, so that what is unpacked is joined while it is near. Returns whether
// every byte was of use; where not, the items hold anything.
extern "C" int kimicore_join_packed(const uint8_t* parts, const int64_t* lengths, uint8_t* items, int64_t count,
                                    int item_bytes) {
  alignas(64) uint8_t room[4][packed::ROOM];
  const uint8_t *in[4] = {}, *end[4] = {}, *planes[4] = {};
  for (int b = 0; b < item_bytes; b++) in[b] = parts, parts += lengths[b], end[b] = parts;
  bool good = true;
  for (int64_t at = 0; at < count && good; at += packed::CHUNK) {
    const int64_t n = std::min(packed::CHUNK, count - at);
    for (int b = 0; b < item_bytes && good; b++) {
      if (lengths[b] == count) {
        planes[b] = in[b] + at;
        continue;
      }
      in[b] = packed::decode(in[b], end[b], n, room[b]);
      planes[b] = room[b];
      good = in[b] != nullptr;
    }
    if (good) join_any(planes, items + at * item_bytes, n, item_bytes);
  }
  fence();
  for (int b = 0; b < item_bytes && good; b++) good = lengths[b] == count || in[b] == end[b];
  return good;
}

extern "C" double kimicore_sampled_bits(const uint8_t* plane, int64_t count) {
  uint32_t seen[4][256] = {};  // four tables: a byte that repeats does not wait for its own count
  int64_t taken = 0;
  const int64_t step = ((count / SAMPLE) | 1) * LINE;
  for (int64_t at = 0; at < count; at += step) {
    const int64_t end = std::min(at + LINE, count);
    for (int64_t i = at; i < end; i++) seen[i & 3][plane[i]]++;
    taken += end - at;
  }
  double sum = 0.0;
  for (int value = 0; value < 256; value++) {
    const double n = (double)seen[0][value] + seen[1][value] + seen[2][value] + seen[3][value];
    if (n > 0.0) sum += n * std::log2(n);
  }
  return taken ? std::log2((double)taken) - sum / (double)taken : 0.0;
}
