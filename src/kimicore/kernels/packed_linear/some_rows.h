// More rows by tiles of codes: a group's codes are whole numbers that bfloat16 has, so they are multiplied as they are, by matrix
// tiles, and a group's sums are scaled and added up in float32. Weights are not rounded at all.
#pragma once
#include "tiles.h"
#include "../amx.h"

#if defined(KC_TILED) && defined(KC_AMX)
namespace {
// Rows of inputs in the order in which codes are unpacked, [blocks][tall][chunks * 64] bytes and some more, and where they are
// needed the sums of their groups [rows][groups].
struct SomeRows {
  char* data;
  float* sums;
  int64_t rows, blocks, tall, row_bytes;
};
inline int64_t some_bytes(const Tiled& w, int64_t rows) {
  return (rows + amx::T) * 2 * w.padded() + 4 * amx::CHUNK + rows * w.groups() * sizeof(float);
}
inline SomeRows some_rows_at(const Tiled& w, int64_t rows, char* to) {
  const int64_t blocks = (rows + amx::T - 1) / amx::T, tall = (rows + blocks - 1) / blocks;
  const bool summed = w.zeros || w.offsets.data;
  float* sums = (float*)(to + blocks * tall * 2 * w.padded() + 4 * amx::CHUNK);
  return {to, summed ? sums : nullptr, rows, blocks, tall, 2 * w.padded()};
}
// Of 8 columns: 0 2 1 3 4 6 5 7. A null row is of zeros.
inline void order_row(const Tiled& w, const bf16* x, const SomeRows& in, int64_t m) {
  char* to = in.data + m * in.row_bytes;
  __m512i order;
  for (int i = 0; i < 32; i++) ((uint16_t*)&order)[i] = (uint16_t)(i / 4 * 4 + (i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4));
  for (int64_t k = 0; k < w.padded(); k += 32) {
    const __m512i v = x ? amx::load_bytes((const char*)(x + k), 2 * (w.depth - k)) : _mm512_setzero_si512();
    _mm512_storeu_si512(to + 2 * k, _mm512_permutexvar_epi16(order, v));
  }
  if (!in.sums || !x) return;
  for (int64_t g = 0; g < w.groups(); g++) {
    const int64_t first = g * w.group, last = std::min(w.depth, first + w.group);
    vf sum{};
    for (int64_t k = first; k < last; k += W) sum = sum + load_part(x + k, (int)std::min<int64_t>(W, last - k));
    in.sums[m * w.groups() + g] = lanes_sum(sum);
  }
}

// A tile's codes, less the zero that all groups have, as right operands: for each group as many tiles as it fills, and 0.
inline int64_t group_tiles(const Tiled& w) { return (2 * std::min(w.group, w.padded()) + amx::CHUNK - 1) / amx::CHUNK; }
inline int64_t operand_bytes(const Tiled& w) { return w.groups() * group_tiles(w) * amx::TILE; }

// What codes of up to 6 bits are in bfloat16.
struct Table {
  __m512i low, high;
};
inline Table code_table(int64_t bits, int64_t zero) {
  Table t;
  for (int i = 0; i < 32; i++) {
    narrow((float)((bits == 4 ? i % 16 : i) - zero), (bf16*)&t.low + i);
    narrow((float)(32 + i - zero), (bf16*)&t.high + i);
  }
  return t;
}
// Two bytes of each lane to two numbers: those at 0 and 2, of what is shifted.
template <int BITS> KC_INLINE __m512i numbers(__m512i four, const Table& table, float zero) {
  if (BITS == 4) return _mm512_permutexvar_epi16(four, table.low);
  if (BITS == 5) return _mm512_permutexvar_epi16(four, table.low);
  if (BITS == 6) return _mm512_permutex2var_epi16(table.low, four, table.high);
  const __m512i byte = _mm512_set1_epi32(255);
  const vf a = (vf)_mm512_cvtepi32_ps(_mm512_and_si512(four, byte)) - zero;
  const vf b = (vf)_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(four, 16), byte)) - zero;
  return _mm512_or_si512(_mm512_srli_epi32((__m512i)a, 16), _mm512_and_si512((__m512i)b, _mm512_set1_epi32((int)0xffff0000)));
}
template <int BITS> void code_operands(const Tiled& w, const uint8_t* codes, const Table& table, char* to) {
  const int64_t end = (w.depth + STEP - 1) / STEP * STEP, bytes = group_tiles(w) * amx::TILE;
  const float zero = (float)w.zero;
  for (int64_t g = 0, k = 0; g < w.groups(); g++, to += bytes) {
    char* at = to;
    for (const int64_t last = std::min(k + w.group, end); k < last; k += STEP, codes += 16 * BITS, at += 4 * amx::CHUNK) {
      if (BITS == 4) {  // a lookup takes the lowest 5 bits, and the table is there twice
        const __m512i all = _mm512_loadu_si512(codes);
        _mm512_store_si512(at, _mm512_permutexvar_epi16(all, table.low));
        _mm512_store_si512(at + amx::CHUNK, _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 8), table.low));
        _mm512_store_si512(at + 2 * amx::CHUNK, _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 4), table.low));
        _mm512_store_si512(at + 3 * amx::CHUNK, _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 12), table.low));
        continue;
      }
      const Codes c = step_codes<BITS>(codes);
      _mm512_store_si512(at, numbers<BITS>(c.first, table, zero));
      _mm512_store_si512(at + amx::CHUNK, numbers<BITS>(_mm512_srli_epi16(c.first, 8), table, zero));
      _mm512_store_si512(at + 2 * amx::CHUNK, numbers<BITS>(c.second, table, zero));
      _mm512_store_si512(at + 3 * amx::CHUNK, numbers<BITS>(_mm512_srli_epi16(c.second, 8), table, zero));
    }
    memset(at, 0, to + bytes - at);
  }
}
inline void code_operands(const Tiled& w, int64_t t, char* to) {
  const Table table = code_table(w.bits, w.zero);
  with_bits(w.bits, [&](auto bits) { code_operands<decltype(bits)::value>(w, w.tile_codes(t), table, to); });
}

// Adds a group's sums of `tall` rows: total += sum * scale + (offset - zero * scale) * the sum of inputs.
template <int HAS>
KC_INLINE void add_group(const Tiled& w, const TileGroups& of, const SomeRows& in, int64_t m, int64_t g, const char* sums, vf* total) {
  const vf scales = load(of.scales + g * LANES);
  vf fixed{};
  if (HAS & OFFSETS) fixed = load(of.offsets + g * LANES);
  if (HAS & ZEROS) fixed = fma(-load(of.zeros + g * LANES), scales, fixed);
  for (int64_t r = 0; r < in.tall; r++) {
    vf sum = fma(load((const float*)(sums + r * amx::CHUNK)), scales, total[r]);
    if (HAS) sum = fma(fixed, splat(in.sums[std::min(m + r, in.rows - 1) * w.groups() + g]), sum);
    total[r] = sum;
  }
}
// One or two blocks of rows from m by two tiles; put(row, which tile, 16 results). A group is added while the next is multiplied.
template <int HAS, int A, class Put>
void blocks_by_codes(
    const Tiled& w, const TileGroups* groups, const SomeRows& in, int64_t m, const char* operands, int64_t bytes, Put&& put) {
  alignas(64) char sums[2][4 * amx::TILE];
  vf total[A][2][LANES] = {};
  const int64_t count = group_tiles(w), row = in.row_bytes;
  const auto add = [&](int64_t g) {
#pragma GCC unroll 2
    for (int a = 0; a < A; a++)
      for (int i = 0; i < 2; i++)
        add_group<HAS>(w, groups[i], in, m + a * in.tall, g, sums[g & 1] + (2 * a + i) * amx::TILE, total[a][i]);
  };
  const char *a0 = in.data + m * row, *a1 = a0 + in.tall * row;
  for (int64_t g = 0; g < w.groups(); g++) {
    const char* b = operands + g * count * amx::TILE;
    const int64_t k = 2 * g * w.group;
    amx::left_sums<amx::Bf16, A>(a0 + k, a1 + k, row, b, b + bytes, count, sums[g & 1]);
    if (g) add(g - 1);
  }
  add(w.groups() - 1);
  for (int a = 0; a < A; a++)
    for (int64_t r = 0; r < in.tall && m + a * in.tall + r < in.rows; r++)
      for (int i = 0; i < 2; i++) put(m + a * in.tall + r, i, total[a][i][r]);
}
template <class Put>
void some_rows(const Tiled& w, const TileGroups* groups, const SomeRows& in, const char* operands, int64_t bytes, Put&& put) {
  with_parts(w, [&](auto has) {
    constexpr int HAS = decltype(has)::value;
    int64_t b = 0;
    for (; b + 2 <= in.blocks; b += 2) blocks_by_codes<HAS, 2>(w, groups, in, b * in.tall, operands, bytes, put);
    if (b < in.blocks) blocks_by_codes<HAS, 1>(w, groups, in, b * in.tall, operands, bytes, put);
  });
}
}  // namespace
#endif
