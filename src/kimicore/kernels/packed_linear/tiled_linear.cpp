// Product of bfloat16 with a weight in tiles: few rows by dot products of bytes, many by matrix tiles or dots of bfloat16 with
// the unpacked weight.
#include "few_rows.h"
#include "some_rows.h"
#include "fused_rows.h"
#include "byte_rows.h"
#if defined(KC_TILED)
#include "../linear/avx512.h"

namespace {
struct TiledCall {
  Tiled weight;
  const void *x, *bias;
  void* y;
  int64_t rows, x_row, y_row;
};
thread_local Scratch input_room, panel_room, group_room;

void put_results(const TiledCall& c, int64_t m, int64_t o, vf sums) {
  const int left = (int)std::min<int64_t>(W, c.weight.outs - o);
  if (left <= 0) return;
  if (c.bias) sums = sums + load_part((const bf16*)c.bias + o, left);
  store_part((bf16*)c.y + m * c.y_row + o, sums, left);
}
// Results of a pair of tiles, 32 beside each other where there are so many.
void put_pair(const TiledCall& c, int64_t m, int64_t pair, vf first, vf second) {
  const int64_t o = 2 * pair * LANES;
  if (o + 2 * LANES > c.weight.outs) {
    put_results(c, m, o, first);
    put_results(c, m, o + LANES, second);
    return;
  }
  if (c.bias) first = first + load((const bf16*)c.bias + o), second = second + load((const bf16*)c.bias + o + LANES);
  _mm512_storeu_si512((bf16*)c.y + m * c.y_row + o, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
float* room_for_groups(const Tiled& w) { return (float*)group_room.need(tile_floats(w) * sizeof(float)); }
int useful_threads(const TiledCall& c, int threads) {
  const int64_t work = (c.rows + 2) * c.weight.outs * c.weight.depth / GRAIN;
  return (int)std::max<int64_t>(1, std::min<int64_t>(threads, work));
}

// Rows of x as integers of 16 bits; without memory nothing.
bool round_rows(const TiledCall& c, int threads, parallel_entry entry, Inputs* in) {
  const Tiled& w = c.weight;
  char* to = input_room.need(input_bytes(w, c.rows));
  if (!to) return false;
  *in = inputs_at(w, c.rows, to);
  shared_range(entry, c.rows * w.depth < GRAIN ? 1 : threads, c.rows, [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) round_row(w, (const bf16*)c.x + m * c.x_row, *in, m);
  });
  return true;
}
bool run_few(const TiledCall& c, int threads, parallel_entry entry) {
  const Tiled& w = c.weight;
  Inputs in;
  if (!round_rows(c, threads, entry, &in)) return false;
  std::atomic<bool> failed{false};
  shared_range(entry, threads, w.tiles(), [&](int64_t first, int64_t last) {
    float* floats = room_for_groups(w);
    if (!floats) return (void)(failed = true);
    for (int64_t t = first; t < last; t++)
      few_rows(w, t, read_tile_groups(w, t, floats), in, [&](int64_t m, vf sums) { put_results(c, m, t * LANES, sums); });
  });
  return !failed;
}

#if defined(KC_AMX)
// What a pair of tiles means; instead of a second that there is not, the last once more.
void tile_pair(const Tiled& w, int64_t p, float* floats, TileGroups* groups, const uint8_t** codes) {
  for (int i = 0; i < 2; i++) {
    const int64_t t = std::min(2 * p + i, w.tiles() - 1);
    groups[i] = read_tile_groups(w, t, floats + i * tile_floats(w));
    codes[i] = w.tile_codes(t);
  }
}
bool run_some(const TiledCall& c, int threads, parallel_entry entry) {
  const Tiled& w = c.weight;
  Inputs in;
  if (!round_rows(c, threads, entry, &in)) return false;
  const Cut cut = cut_rows(w, c.rows);
  std::atomic<bool> failed{false};
  shared_range(entry, threads, (w.tiles() + 1) / 2, [&](int64_t first, int64_t last) {
    float* floats = (float*)group_room.need(2 * tile_floats(w) * sizeof(float));
    char* room = panel_room.need(some_bytes(w, cut));
    if (!floats || !room) return (void)(failed = true);
    const CutTiles tiles(cut);
    for (int64_t p = first; p < last; p++) {
      TileGroups groups[2];
      const uint8_t* codes[2];
      tile_pair(w, p, floats, groups, codes);
      some_rows(w, codes, groups, in, cut, some_room(w, room), [&](int64_t m, vf first, vf second) {
        put_pair(c, m, p, first, second);
      });
    }
  });
  return !failed;
}

// Rows of x with zeros behind their ends, for matrix tiles: as many as 16 divides, an odd number of cache lines apart, so that
// the same columns of all rows are in one cache together.
struct PaddedRows {
  const char* data;
  int64_t row_bytes, chunks;
};
bool pad_rows(const TiledCall& c, int threads, parallel_entry entry, PaddedRows* x) {
  const int64_t depth = 2 * c.weight.depth, chunks = (depth + amx::CHUNK - 1) / amx::CHUNK, bytes = (chunks | 1) * amx::CHUNK;
  const int64_t rows = (c.rows + amx::T - 1) / amx::T * amx::T;
  char* to = input_room.need(rows * bytes);
  if (!to) return false;
  shared_range(entry, rows * depth < GRAIN ? 1 : threads, rows, [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) {
      if (m < c.rows) memcpy(to + m * bytes, (const bf16*)c.x + m * c.x_row, depth);
      memset(to + m * bytes + (m < c.rows ? depth : 0), 0, bytes - (m < c.rows ? depth : 0));
    }
  });
  *x = {to, bytes, chunks};
  return true;
}
bool run_fused(const TiledCall& c, int threads, parallel_entry entry) {
  const Tiled& w = c.weight;
  PaddedRows x;
  if (!pad_rows(c, threads, entry, &x)) return false;
  const int64_t blocks = (c.rows + amx::T - 1) / amx::T, tall = (c.rows + blocks - 1) / blocks;
  std::atomic<bool> failed{false};
  shared_range(entry, threads, (w.tiles() + 1) / 2, [&](int64_t first, int64_t last) {
    alignas(64) char sums[4 * amx::TILE];
    float* floats = (float*)group_room.need(2 * tile_floats(w) * sizeof(float));
    char* room = panel_room.need(FUSED_BYTES);
    if (!floats || !room) return (void)(failed = true);
    const amx::Tiles tiles((int)tall);
    for (int64_t p = first; p < last; p++) {
      TileGroups groups[2];
      const uint8_t* codes[2];
      tile_pair(w, p, floats, groups, codes);
      fused_sums(w, codes, groups, x.data, blocks == 2 ? x.data + tall * x.row_bytes : nullptr, x.row_bytes, room, sums);
      for (int64_t b = 0; b < blocks; b++)
        for (int64_t r = 0; r < tall && b * tall + r < c.rows; r++) {
          const float* at = (const float*)(sums + 2 * b * amx::TILE) + r * W;
          put_pair(c, b * tall + r, p, load(at), load(at + amx::TILE / sizeof(float)));
        }
    }
  });
  return !failed;
}
// All rows by `count` pairs of tiles from `pair` on, whose operands lie at `panels`; put(row, pair, 16 sums, 16 sums).
template <class Kind, class Put>
void multiply(const char* x, int64_t rows, int64_t chunks, int64_t row, int64_t pair, int64_t count, const char* panels, int64_t tile_bytes, Put&& put) {
  alignas(64) char sums[4 * amx::TILE];
  const int64_t blocks = (rows + amx::T - 1) / amx::T;
  for (int64_t b = 0; b < blocks; b += 2)
    for (int64_t p = 0; p < count; p++) {
      const char *a = x + b * amx::T * row, *first = panels + 2 * p * tile_bytes, *second = first + tile_bytes;
      const int many = b + 1 < blocks ? 2 : 1;
      if (many == 2) amx::left_sums<Kind, 2>(a, a + amx::T * row, row, first, second, chunks, sums);
      else amx::left_sums<Kind, 1>(a, nullptr, row, first, second, chunks, sums);
      for (int i = 0; i < many; i++)
        for (int r = 0; r < amx::T && (b + i) * amx::T + r < rows; r++) {
          const float* at = (const float*)(sums + 2 * i * amx::TILE) + r * W;
          put((b + i) * amx::T + r, pair + p, load(at), load(at + amx::TILE / sizeof(float)));
        }
    }
}
// So many pairs of tiles that their operands stay close while rows pass by.
int64_t pairs_at_once(int64_t tile_bytes) {
  constexpr int64_t CLOSE = 512 << 10;
  return std::max<int64_t>(1, std::min<int64_t>(amx::MOST_PANELS, CLOSE / (2 * tile_bytes)));
}
bool run_bytes(const TiledCall& c, int threads, parallel_entry entry) {
  const Tiled& w = c.weight;
  char* to = input_room.need(byte_row_bytes(w, c.rows));
  if (!to) return false;
  const ByteRows in = byte_rows_at(w, c.rows, to);
  shared_range(entry, c.rows * w.depth < GRAIN ? 1 : threads, whole_rows(c.rows), [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++)
      if (m < c.rows) round_byte_row(w, (const bf16*)c.x + m * c.x_row, in, m);
      else memset(in.data + m * in.row_bytes, 0, in.row_bytes);
  });
  const int64_t pairs = (w.tiles() + 1) / 2, tile_bytes = w.padded() * LANES, many = pairs_at_once(tile_bytes);
  std::atomic<bool> failed{false};
  shared_range(entry, threads, pairs, [&](int64_t first, int64_t last) {
    float* floats = room_for_groups(w);
    char* panels = panel_room.need(2 * many * tile_bytes);
    if (!floats || !panels) return (void)(failed = true);
    const amx::Tiles tiles;
    for (int64_t p = first; p < last; p += many) {
      const int64_t count = std::min(many, last - p);
      vf scales[2 * amx::MOST_PANELS] = {};
      for (int64_t t = 0; t < 2 * count; t++) {
        char* operand = panels + t * tile_bytes;
        if (2 * p + t >= w.tiles()) memset(operand, 0, tile_bytes);
        else scales[t] = byte_operands(w, 2 * p + t, read_tile_groups(w, 2 * p + t, floats), operand);
      }
      multiply<amx::Int8>(in.data, c.rows, w.padded() / amx::CHUNK, in.row_bytes, p, count, panels, tile_bytes, [&](int64_t m, int64_t pair, vf first, vf second) {
        const vf *own = scales + 2 * (pair - p), row = splat(in.scales[m]);
        put_pair(c, m, pair, (vf)_mm512_cvtepi32_ps((__m512i)first) * (own[0] * row), (vf)_mm512_cvtepi32_ps((__m512i)second) * (own[1] * row));
      });
    }
  });
  return !failed;
}
bool run_many(const TiledCall& c, int threads, parallel_entry entry) {
  const Tiled& w = c.weight;
  const int64_t pairs = (w.tiles() + 1) / 2, tile_bytes = w.padded() * LANES * sizeof(bf16), many = pairs_at_once(tile_bytes);
  PaddedRows x;
  if (!pad_rows(c, threads, entry, &x)) return false;
  std::atomic<bool> failed{false};
  shared_range(entry, threads, pairs, [&](int64_t first, int64_t last) {
    float* floats = room_for_groups(w);
    char* panels = panel_room.need(2 * many * tile_bytes);
    if (!floats || !panels) return (void)(failed = true);
    const amx::Tiles tiles;
    for (int64_t p = first; p < last; p += many) {
      const int64_t count = std::min(many, last - p);
      for (int64_t t = 0; t < 2 * count; t++) {
        char* to = panels + t * tile_bytes;
        if (2 * p + t < w.tiles()) unpack_tile(w, 2 * p + t, read_tile_groups(w, 2 * p + t, floats), (bf16*)to);
        else memset(to, 0, tile_bytes);
      }
      multiply<amx::Bf16>(x.data, c.rows, x.chunks, x.row_bytes, p, count, panels, tile_bytes, [&](int64_t m, int64_t pair, vf first, vf second) {
        put_pair(c, m, pair, first, second);
      });
    }
  });
  return !failed;
}
#else
// Unpacked row by row: units of two columns [padded / 2][16 outputs] with outputs as rows.
void turn(const Tiled& w, const bf16* tile, bf16* rows) {
  for (int64_t k = 0; k < w.padded(); k += 2 * W) {
    vf t[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) memcpy(&t[i], tile + (k / 2 + i) * 2 * LANES, sizeof(vf));
    transpose(t);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) memcpy(rows + i * w.padded() + k, &t[i], sizeof(vf));
  }
}
bool run_many(const TiledCall& c, int threads, parallel_entry entry) {
  const Tiled& w = c.weight;
  std::atomic<bool> failed{false};
  shared_range(entry, threads, w.tiles(), [&](int64_t first, int64_t last) {
    float* floats = room_for_groups(w);
    bf16* to = (bf16*)panel_room.need(2 * LANES * w.padded() * sizeof(bf16));
    if (!floats || !to) return (void)(failed = true);
    for (int64_t t = first; t < last; t++) {
      const int64_t o = t * LANES, outs = std::min(LANES, w.outs - o);
      bf16* rows = to + LANES * w.padded();
      unpack_tile(w, t, read_tile_groups(w, t, floats), to);
      turn(w, to, rows);
      const bf16* bias = c.bias ? (const bf16*)c.bias + o : nullptr;
      const Call one{c.x, rows, bias, (bf16*)c.y + o, c.rows, outs, w.depth, c.x_row, w.padded(), c.y_row};
      half_range(one, 0, outs, LANES);
    }
  });
  return !failed;
}
#endif

void read_row(const Tiled& w, int64_t row, const TileGroups& groups, bf16* unpacked, bf16* to) {
  unpack_tile(w, row / LANES, groups, unpacked);
  const int64_t lane = row % LANES;
  for (int64_t k = 0; k < w.depth; k++) to[k] = unpacked[(k / 2 * LANES + lane) * 2 + k % 2];
}
}  // namespace
#endif

// Whether weights in tiles are served on this processor: 0, 1, or 2 where matrix tiles multiply codes.
extern "C" int kimicore_tiled_serves() {
#if defined(KC_TILED) && defined(KC_AMX)
  return amx::allowed() ? 2 : 1;
#elif defined(KC_TILED)
  return 1;
#else
  return 0;
#endif
}
#if defined(KC_TILED)
// Up to `few` rows by dot products of bytes, up to `some` by matrix tiles of codes. Returns 0, or 1 where there is no memory.
extern "C" int kimicore_tiled_linear(const TiledCall* c, int64_t few, int64_t some, int threads, parallel_entry entry) {
  if (c->rows == 0) return 0;
  const int useful = useful_threads(*c, threads);
#if defined(KC_AMX)
  static const bool allowed = amx::allowed();
  if (!allowed) few = INT64_MAX;
  if (c->rows > few && c->rows <= some) return !run_some(*c, useful, entry);
#else
  (void)some;
#endif
#if defined(KC_AMX)
  if (c->rows > few && c->rows <= FUSED_ROWS) return !run_fused(*c, useful, entry);
#endif
  return c->rows <= few ? !run_few(*c, useful, entry) : !run_many(*c, useful, entry);
}
#if defined(KC_AMX)
// With inputs rounded to 8 bits. Returns 0, or 1 where there is no memory.
extern "C" int kimicore_tiled_bytes(const TiledCall* c, int threads, parallel_entry entry) {
  return c->rows ? !run_bytes(*c, useful_threads(*c, threads), entry) : 0;
}
#endif
extern "C" int kimicore_tiled_rows(const Tiled* w, const int64_t* rows, int64_t count, void* to, int threads, parallel_entry entry) {
  std::atomic<bool> failed{false};
  shared_range(entry, threads, count, [&](int64_t first, int64_t last) {
    float* floats = room_for_groups(*w);
    bf16* unpacked = (bf16*)panel_room.need(LANES * w->padded() * sizeof(bf16));
    if (!floats || !unpacked) return (void)(failed = true);
    for (int64_t i = first; i < last; i++)
      read_row(*w, rows[i], read_tile_groups(*w, rows[i] / LANES, floats), unpacked, (bf16*)to + i * w->depth);
  });
  return failed;
}
#endif
