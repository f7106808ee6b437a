// More rows by matrix tiles of codes: as few_rows.h, with the same bits, but sums over a block of columns come from tiles.
//
// A tile's codes of a block are right operands as they are once their bytes are unpacked: with 8 bits they are read where they
// lie. Left operands are the high and the low bytes of inputs: one tile of both where that has room for them, else two.
#pragma once
#include "../amx.h"
#include "few_rows.h"

#if defined(KC_TILED) && defined(KC_AMX)
namespace {
// How rows and a block's columns are cut into tiles: `blocks` times `tall` rows, `chunks` times `chunk` columns.
struct Cut {
  int64_t blocks, tall, chunks, chunk;
  bool stacked;  // high and low bytes are rows of one tile
  int left_rows() const { return (int)(stacked ? 2 * tall : tall); }
};
inline Cut cut_rows(const Tiled& w, int64_t rows) {
  const int64_t blocks = (rows + amx::T - 1) / amx::T, tall = (rows + blocks - 1) / blocks;
  const int64_t chunks = (w.block + amx::CHUNK - 1) / amx::CHUNK;
  return {blocks, tall, chunks, w.block / chunks, 2 * rows <= amx::T};
}
// Tiles are set up as long as this lives: 0 to 3 sums, 4 and 5 left operands, 6 and 7 right ones.
struct CutTiles {
  explicit CutTiles(const Cut& cut) {
    amx::Tiles::Config config;
    for (int i = 0; i < 8; i++) {
      config.bytes[i] = (uint16_t)(i == 4 || i == 5 ? cut.chunk : amx::CHUNK);
      config.rows[i] = (uint8_t)(i < 6 ? cut.left_rows() : cut.chunk / 4);
    }
    _tile_loadconfig(&config);
  }
  ~CutTiles() { _tile_release(); }
};

// What a thread works in: right operands and sums, two of each in turns, and all rows' totals [blocks * tall][2 tiles].
struct SomeRoom {
  char *operands[2], *sums[2];
  vf* totals;
};
inline int64_t right_bytes(const Tiled& w) { return (w.block * LANES + amx::CHUNK - 1) / amx::CHUNK * amx::CHUNK; }
inline int64_t some_bytes(const Tiled& w, const Cut& cut) {
  return 4 * right_bytes(w) + 8 * amx::TILE + cut.blocks * cut.tall * 2 * (int64_t)sizeof(vf);
}
inline SomeRoom some_room(const Tiled& w, char* to) {
  const int64_t right = 2 * right_bytes(w);
  char* sums = to + 2 * right;
  return {{to, to + right}, {sums, sums + 4 * amx::TILE}, (vf*)(sums + 8 * amx::TILE)};
}

// The right operand of a tile's block of columns; unpacked into `to` where it does not lie there as it has to.
template <int BITS> KC_INLINE const char* right_operand(const Tiled& w, const uint8_t* codes, int64_t block, char* to) {
  constexpr int64_t AHEAD = 2048;
  const int64_t first = block * w.block, last = std::min(first + w.block, w.padded());
  const uint8_t* step = codes + first / STEP * w.step_bytes();
  if (BITS == 8 && last - first == w.block) {
    for (int64_t at = 0; at < w.block * LANES; at += amx::CHUNK) __builtin_prefetch(step + AHEAD + at);
    return (const char*)step;
  }
  for (int64_t k = first; k < last; k += STEP, step += LANES * BITS, to += 2 * amx::CHUNK) {
    __builtin_prefetch(step + AHEAD);
    const Codes c = step_codes<BITS>(step);
    _mm512_store_si512(to, c.first);
    _mm512_store_si512(to + amx::CHUNK, c.second);
  }
  return to - (last - first) * LANES;
}
// Sums of a block of rows and of columns by two tiles, as [left operand][tile][row][16 outputs].
template <bool STACKED>
KC_INLINE void tile_sums(const Cut& cut, const char* high, const char* low, int64_t row, const char* const* right, char* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (!STACKED) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t c = 0; c < cut.chunks; c++) {
    _tile_loadd(4, high + c * cut.chunk, row);
    _tile_loadd(6, right[0] + c * cut.chunk * LANES, amx::CHUNK);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, right[1] + c * cut.chunk * LANES, amx::CHUNK);
    _tile_dpbsud(1, 4, 7);
    if (!STACKED) {
      _tile_loadd(5, low + c * cut.chunk, row);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  _tile_stored(0, sums, amx::CHUNK);
  _tile_stored(1, sums + amx::TILE, amx::CHUNK);
  if (!STACKED) {
    _tile_stored(2, sums + 2 * amx::TILE, amx::CHUNK);
    _tile_stored(3, sums + 3 * amx::TILE, amx::CHUNK);
  }
}
template <int HAS, bool STACKED>
KC_INLINE void add_sums(const Cut& cut, const BlockScales* of, const Inputs& in, int64_t m, int64_t block, const char* sums, vf* totals) {
  const int64_t low = STACKED ? cut.tall * amx::CHUNK : 2 * amx::TILE;
  const int64_t count = std::min(cut.tall, in.rows - m);
  for (int64_t r = 0; r < count; r++, sums += amx::CHUNK, totals += 2)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const char* at = sums + i * amx::TILE;
      totals[i] = add_block<HAS>(_mm512_load_si512(at), _mm512_load_si512(at + low), of[i], in, m + r, block, totals[i]);
    }
}
// All rows by two tiles; put(row, 16 results, 16 results). A block is unpacked, one multiplied and one added at a time, so that
// none of them waits for what another has just stored.
template <int BITS, int HAS, bool STACKED, class Put>
void some_rows(const Tiled& w, const uint8_t* const* codes, const TileGroups* groups, const Inputs& in, const Cut& cut, const SomeRoom& room, Put&& put) {
  memset((void*)room.totals, 0, cut.blocks * cut.tall * 2 * sizeof(vf));
  const int64_t right_size = right_bytes(w), per = w.group == w.depth ? in.blocks : w.group / w.block;
  const char* right[2][2];
  const auto unpack = [&](int64_t b) {
    for (int i = 0; i < 2; i++) right[b & 1][i] = right_operand<BITS>(w, codes[i], b, room.operands[b & 1] + i * right_size);
  };
  int64_t turn = 0, last_m = 0, last_b = 0;
  const auto add = [&](int64_t at) {
    const BlockScales of[2] = {block_scales<HAS>(groups[0], last_b / per), block_scales<HAS>(groups[1], last_b / per)};
    add_sums<HAS, STACKED>(cut, of, in, last_m, last_b, room.sums[at & 1], room.totals + 2 * last_m);
  };
  unpack(0);
  for (int64_t b = 0; b < in.blocks; b++) {
    const char* at = (const char*)in.high + b * w.block;
    for (int64_t m = 0; m < cut.blocks * cut.tall; m += cut.tall, turn++) {
      const char* high = at + m * in.row_bytes;
      tile_sums<STACKED>(cut, high, high + in.rows * in.row_bytes, in.row_bytes, right[b & 1], room.sums[turn & 1]);
      if (m == 0 && b + 1 < in.blocks) unpack(b + 1);
      if (turn) add(turn - 1);
      last_m = m, last_b = b;
    }
  }
  add(turn - 1);
  for (int64_t m = 0; m < in.rows; m++) put(m, room.totals[2 * m], room.totals[2 * m + 1]);
}
template <class Put>
void some_rows(const Tiled& w, const uint8_t* const* codes, const TileGroups* groups, const Inputs& in, const Cut& cut, const SomeRoom& room, Put&& put) {
  with_bits(w.bits, [&](auto bits) {
    with_parts(w, [&](auto has) {
      constexpr int BITS = decltype(bits)::value, HAS = decltype(has)::value;
      if (cut.stacked) some_rows<BITS, HAS, true>(w, codes, groups, in, cut, room, put);
      else some_rows<BITS, HAS, false>(w, codes, groups, in, cut, room, put);
    });
  });
}
}  // namespace
#endif
