// Product of bfloat16 with a weight in tiles: few rows by dot products of bytes, many by matrix tiles or dots of bfloat16 with
// the unpacked weight.
#include "few_rows.h"
#include "some_rows.h"
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
float* room_for_groups(const Tiled& w) { return (float*)group_room.need(tile_floats(w) * sizeof(float)); }
int useful_threads(const TiledCall& c, int threads) {
  const int64_t work = (c.rows + 2) * c.weight.outs * c.weight.depth / GRAIN;
  return (int)std::max<int64_t>(1, std::min<int64_t>(threads, work));
}

bool run_few(const TiledCall& c, int threads, parallel_entry entry) {
  const Tiled& w = c.weight;
  char* to = input_room.need(input_bytes(w, c.rows));
  if (!to) return false;
  const Inputs in = inputs_at(w, c.rows, to);
  shared_range(entry, c.rows * w.depth < GRAIN ? 1 : threads, c.rows, [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) round_row(w, (const bf16*)c.x + m * c.x_row, in, m);
  });
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
bool run_some(const TiledCall& c, int threads, parallel_entry entry) {
  const Tiled& w = c.weight;
  char* to = input_room.need(some_bytes(w, c.rows));
  if (!to) return false;
  const SomeRows in = some_rows_at(w, c.rows, to);
  shared_range(entry, c.rows * w.depth < GRAIN ? 1 : threads, in.blocks * in.tall, [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) order_row(w, m < c.rows ? (const bf16*)c.x + m * c.x_row : nullptr, in, m);
  });
  const int64_t pairs = (w.tiles() + 1) / 2, bytes = operand_bytes(w);
  std::atomic<bool> failed{false};
  shared_range(entry, threads, pairs, [&](int64_t first, int64_t last) {
    float* floats = (float*)group_room.need(2 * tile_floats(w) * sizeof(float));
    char* operands = panel_room.need(2 * bytes);
    if (!floats || !operands) return (void)(failed = true);
    const amx::Tiles tiles((int)in.tall);
    for (int64_t p = first; p < last; p++) {
      TileGroups groups[2];
      for (int i = 0; i < 2; i++) {
        const int64_t t = std::min(2 * p + i, w.tiles() - 1);  // a tile that there is not: the last once more, not put
        groups[i] = read_tile_groups(w, t, floats + i * tile_floats(w));
        code_operands(w, t, operands + i * bytes);
      }
      some_rows(w, groups, in, operands, bytes, [&](int64_t m, int i, vf sums) {
        if (2 * p + i < w.tiles()) put_results(c, m, (2 * p + i) * LANES, sums);
      });
    }
  });
  return !failed;
}

// Rows of x with zeros behind their ends, for matrix tiles: [rows rounded up to 16][chunks * 64] bytes.
char* padded_rows(const TiledCall& c, int64_t chunks, int threads, parallel_entry entry) {
  const int64_t bytes = chunks * amx::CHUNK, depth = 2 * c.weight.depth, rows = (c.rows + amx::T - 1) / amx::T * amx::T;
  char* to = input_room.need(rows * bytes);
  if (!to) return nullptr;
  shared_range(entry, threads, rows, [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) {
      if (m < c.rows) memcpy(to + m * bytes, (const bf16*)c.x + m * c.x_row, depth);
      memset(to + m * bytes + (m < c.rows ? depth : 0), 0, bytes - (m < c.rows ? depth : 0));
    }
  });
  return to;
}
// All rows by `count` pairs of tiles from `pair` on, whose operands lie at `panels`; put(row, tile, 16 sums).
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
        for (int r = 0; r < amx::T && (b + i) * amx::T + r < rows; r++)
          for (int t = 0; t < 2; t++)
            put((b + i) * amx::T + r, 2 * (pair + p) + t, load((const float*)(sums + (2 * i + t) * amx::TILE) + r * W));
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
      multiply<amx::Int8>(in.data, c.rows, w.padded() / amx::CHUNK, in.row_bytes, p, count, panels, tile_bytes, [&](int64_t m, int64_t t, vf sums) {
        put_results(c, m, t * LANES, (vf)_mm512_cvtepi32_ps((__m512i)sums) * (scales[t - 2 * p] * in.scales[m]));
      });
    }
  });
  return !failed;
}
bool run_many(const TiledCall& c, int threads, parallel_entry entry) {
  const Tiled& w = c.weight;
  const int64_t chunks = (2 * w.depth + amx::CHUNK - 1) / amx::CHUNK, pairs = (w.tiles() + 1) / 2;
  const int64_t tile_bytes = w.padded() * LANES * sizeof(bf16);
  const int64_t many = pairs_at_once(tile_bytes);
  const char* x = padded_rows(c, chunks, threads, entry);
  if (!x) return false;
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
      multiply<amx::Bf16>(x, c.rows, chunks, chunks * amx::CHUNK, p, count, panels, tile_bytes, [&](int64_t m, int64_t t, vf sums) {
        put_results(c, m, t * LANES, sums);
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
