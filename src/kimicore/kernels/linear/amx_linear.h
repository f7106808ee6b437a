// The product of bfloat16 on processors with matrix tiles.
#pragma once
#include "call.h"
#include "../amx.h"

#if defined(KC_AMX)
namespace {
thread_local Scratch tile_rows, tile_weights;

// The weights of outputs [o, o + outs) for tiles; `room` has space for a copy of a panel.
amx::Weights panel_weights(const Call& c, int64_t o, int64_t outs, int64_t chunks, char* room) {
  const int64_t depth = 2 * c.depth, row = 2 * c.weight_row, padded = chunks * amx::CHUNK;
  const char* at = (const char*)c.weight + o * row;
  if (outs >= amx::PANEL) {
    if (depth / amx::CHUNK < chunks) amx::pack_tail(at, row, outs, depth, room);
    return {at, row, depth / amx::CHUNK, room};
  }
  memset(room, 0, amx::PANEL * padded);  // for the outputs that there are not
  for (int64_t i = 0; i < outs; i++) memcpy(room + i * padded, at + i * row, depth);
  return {room, padded, chunks, nullptr};
}

// Returns whether there was memory for the packed rows.
bool run_tiles(const Call& c, int threads, parallel_entry entry) {
  if (c.rows == 0 || c.outs == 0) return true;
  const int64_t panels = (c.outs + amx::PANEL - 1) / amx::PANEL;
  const int useful = (int)std::min<int64_t>(threads, std::max<int64_t>(1, c.rows * c.outs * c.depth / GRAIN));
  char* to = tile_rows.need(amx::packed_bytes(c.rows, 2 * c.depth) + 64);
  if (!to) return false;
  const amx::Rows x = amx::pack_rows((const char*)c.x, 2 * c.x_row, c.rows, 2 * c.depth, to, useful, entry);
  const int64_t room = amx::PANEL * amx::CHUNK * std::max<int64_t>(1, x.chunks);
  const int many = amx::panels_at_once(x);
  std::atomic<bool> failed{false};
  shared_range(entry, useful, panels, [&](int64_t first, int64_t last) {
    char* own = tile_weights.need(many * room);
    if (!own) return (void)(failed = true);
    const amx::Tiles tiles;
    for (int64_t p = first; p < last; p += many) {
      const int64_t o = p * amx::PANEL;
      const int count = (int)std::min<int64_t>(many, last - p);
      amx::Weights w[amx::MOST_PANELS];
      for (int i = 0; i < count; i++)
        w[i] = panel_weights(c, o + i * amx::PANEL, c.outs - o - i * amx::PANEL, x.chunks, own + i * room);
      const bool more = many == 1 && p + 1 < last && c.weight_row == c.depth && (p + 2) * amx::PANEL <= c.outs;
      const char* ahead = more ? (const char*)c.weight + 2 * (o + amx::PANEL) * c.weight_row : nullptr;
      amx::panels<amx::Bf16>(x, w, count, ahead, [&](int64_t m, int64_t n, vf sums) {
        const int left = (int)std::min<int64_t>(W, c.outs - o - n);
        if (left <= 0) return;
        if (c.bias) sums = sums + load_part((const bf16*)c.bias + o + n, left);
        store_part((bf16*)c.y + m * c.y_row + o + n, sums, left);
      });
    }
  });
  return !failed;
}
}  // namespace
#endif
