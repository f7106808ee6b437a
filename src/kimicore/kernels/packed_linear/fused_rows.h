// Rows of one or two tiles by the weight in bfloat16, which is unpacked chunk by chunk beside the products: each result is one
// chain over the columns, with the bits that the product with the unpacked weight has.
#pragma once
#include "../amx.h"
#include "tiles.h"

#if defined(KC_TILED) && defined(KC_AMX)
namespace {
constexpr int64_t FUSED_ROWS = 2 * amx::T, FUSED_BYTES = 4 * amx::TILE;

// One or two blocks of rows (A) from x0 and x1 by two tiles, into sums [A][2][16 rows][16 outputs]; `room` has FUSED_BYTES.
template <int BITS, int HAS, int A>
void fused_sums(
    const Tiled& w, const uint8_t* const* codes, const TileGroups* groups, const char* x0, const char* x1, int64_t row, char* room, char* sums) {
  constexpr int64_t COLUMNS = amx::CHUNK / sizeof(bf16);
  Unpacking<BITS, HAS> first(w, codes[0], groups[0]), second(w, codes[1], groups[1]);
  const auto unpack = [&](char* to) {
    for (int64_t k = 0; k < COLUMNS; k += STEP, to += STEP * LANES * sizeof(bf16)) {
      first.step((bf16*)to);
      second.step((bf16*)(to + amx::TILE));
    }
  };
  _tile_zero(0);
  _tile_zero(1);
  if (A == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const int64_t chunks = (w.depth + COLUMNS - 1) / COLUMNS;
  unpack(room);
  for (int64_t c = 0; c < chunks; c++) {
    const char* right = room + (c & 1) * 2 * amx::TILE;
    _tile_loadd(4, x0 + c * amx::CHUNK, row);
    _tile_loadd(6, right, amx::CHUNK);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + amx::TILE, amx::CHUNK);
    _tile_dpbf16ps(1, 4, 7);
    if (A == 2) {
      _tile_loadd(5, x1 + c * amx::CHUNK, row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    if (c + 1 < chunks) unpack(room + (~c & 1) * 2 * amx::TILE);
  }
  _tile_stored(0, sums, amx::CHUNK);
  _tile_stored(1, sums + amx::TILE, amx::CHUNK);
  if (A == 2) {
    _tile_stored(2, sums + 2 * amx::TILE, amx::CHUNK);
    _tile_stored(3, sums + 3 * amx::TILE, amx::CHUNK);
  }
}
inline void fused_sums(
    const Tiled& w, const uint8_t* const* codes, const TileGroups* groups, const char* x0, const char* x1, int64_t row, char* room, char* sums) {
  with_bits(w.bits, [&](auto bits) {
    with_parts(w, [&](auto has) {
      constexpr int BITS = decltype(bits)::value, HAS = decltype(has)::value;
      if (x1) fused_sums<BITS, HAS, 2>(w, codes, groups, x0, x1, row, room, sums);
      else fused_sums<BITS, HAS, 1>(w, codes, groups, x0, x1, row, room, sums);
    });
  });
}
}  // namespace
#endif
