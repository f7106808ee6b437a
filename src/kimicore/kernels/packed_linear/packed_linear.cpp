// Product with a weight of 4 to 8 bits: panel after panel is unpacked into a cache, in the type of the product, and multiplied
// there as a dense weight is. So a result has the bits of the dense product with the unpacked weight.
#include "../simd.h"
#include "unpack.h"
#if defined(KC_AVX512)
#include "../linear/avx512.h"
#else
#include "../linear/packed.h"
#endif

namespace {
constexpr int64_t OUTS = 32;  // of a panel

struct PackedCall {
  Packed weight;
  const void *x, *bias;
  void* y;
  int64_t rows, x_row, y_row;
};
thread_local Scratch panel_room, group_room;

template <class T> T* room_for_panels(const Packed& w, int64_t panels) {
  return (T*)panel_room.need(panels * OUTS * w.padded() * sizeof(T));
}
float* room_for_groups(const Packed& w) { return (float*)group_room.need(group_floats(w) * sizeof(float)); }
int useful_threads(const PackedCall& c, int threads) {
  const int64_t work = (c.rows + 4) * c.weight.outs * c.weight.depth / GRAIN;  // unpacking counts as some rows
  return (int)std::max<int64_t>(1, std::min<int64_t>(threads, work));
}
// The dense product with outputs [o, o + outs), unpacked at `panel`.
template <class T> Call dense(const PackedCall& c, const T* panel, int64_t o, int64_t outs) {
  const T* bias = c.bias ? (const T*)c.bias + o : nullptr;
  return {c.x, panel, bias, (T*)c.y + o, c.rows, outs, c.weight.depth, c.x_row, c.weight.padded(), c.y_row};
}

// multiply(dense call, its outputs) panel by panel on all threads; whether there was memory.
template <class T, class Multiply> bool by_panels(const PackedCall& c, int threads, parallel_entry entry, Multiply&& multiply) {
  const Packed& w = c.weight;
  const int64_t panels = (w.outs + OUTS - 1) / OUTS;
  std::atomic<bool> failed{false};
  shared_range(entry, threads, panels, [&](int64_t first, int64_t last) {
    T* to = room_for_panels<T>(w, 1);
    float* groups = room_for_groups(w);
    if (!to || !groups) return (void)(failed = true);
    for (int64_t p = first; p < last; p++) {
      const int64_t o = p * OUTS, outs = std::min(OUTS, w.outs - o);
      unpack_rows(w, o, outs, groups, to);
      if (!multiply(dense(c, to, o, outs), outs)) failed = true;
    }
  });
  return !failed;
}

#if defined(KC_AVX512)
bool run_wide(const PackedCall& c, int threads, parallel_entry entry) {
  return by_panels<float>(c, threads, entry, [](const Call& one, int64_t outs) { return wide_range<Wide>(one, 0, outs), true; });
}
#if defined(KC_BF16_DOT)
bool run_dots(const PackedCall& c, int threads, parallel_entry entry) {
  return by_panels<bf16>(c, threads, entry, [](const Call& one, int64_t outs) { return half_range(one, 0, outs, OUTS), true; });
}
#endif
#else
template <class T> bool run_any(const PackedCall& c, int threads, parallel_entry entry) {
  Call all{c.x, nullptr, c.bias, c.y, c.rows, c.weight.outs, c.weight.depth, c.x_row, 0, c.y_row};
  if (c.rows < PACKED_ROWS) {
    const PlainRows rows = plain_rows<T>(all);
    return rows.there && by_panels<T>(c, threads, entry, [&](const Call& one, int64_t outs) {
      return plain_range<T>(one, rows.x, rows.stride, 0, outs), true;
    });
  }
  const Packing p(all.depth);
  const int64_t block = packed_block(p), tiles = (std::min(c.rows, block) + PM - 1) / PM;
  float* x = (float*)rows_scratch.need(tiles * p.tile_floats() * sizeof(float));
  if (!x) return false;
  bool done = true;
  for (int64_t m = 0; m < c.rows && done; m += block) {
    const int64_t stop = std::min(c.rows, m + block);
    pack_all<T>(all, p, m, stop, x, threads, entry);
    done = by_panels<T>(c, threads, entry, [&](const Call& one, int64_t outs) {
      float* w = (float*)weights_scratch.need(p.panel_floats() * sizeof(float));
      if (w) packed_range<T>(one, p, x, w, m, stop, 0, (outs + PW - 1) / PW);
      return w != nullptr;
    });
  }
  return done;
}
#endif

template <class T> bool rows_of(const Packed& w, const int64_t* rows, int64_t count, T* to, int threads, parallel_entry entry) {
  std::atomic<bool> failed{false};
  shared_range(entry, count * w.depth < GRAIN ? 1 : threads, count, [&](int64_t first, int64_t last) {
    T* one = room_for_panels<T>(w, 1);
    float* groups = room_for_groups(w);
    if (!one || !groups) return (void)(failed = true);
    for (int64_t i = first; i < last; i++) {
      unpack_row(w, rows[i], groups, one);
      memcpy(to + i * w.depth, one, w.depth * sizeof(T));
    }
  });
  return !failed;
}
}  // namespace

// Whether a type (0 float32, 1 bfloat16, 2 float16) is served.
extern "C" int kimicore_packed_linear_serves(int type) {
#if defined(KC_BF16_DOT)
  return type == 0 || type == 1;
#elif defined(KC_AVX512)
  return type == 0;
#else
  return type >= 0 && type <= 2;
#endif
}
// Return 0, or 1 where there is no memory.
extern "C" int kimicore_packed_linear(const PackedCall* c, [[maybe_unused]] int type, int threads, parallel_entry entry) {
  if (c->rows == 0) return 0;
  const int useful = useful_threads(*c, threads);
#if defined(KC_BF16_DOT)
  if (type == 1) return !run_dots(*c, useful, entry);
#endif
#if defined(KC_AVX512)
  return !run_wide(*c, useful, entry);
#else
  if (type == 1) return !run_any<bf16>(*c, useful, entry);
  if (type == 2) return !run_any<f16>(*c, useful, entry);
  return !run_any<float>(*c, useful, entry);
#endif
}
extern "C" int kimicore_packed_rows(
    const Packed* w, int type, const int64_t* rows, int64_t count, void* to, int threads, parallel_entry entry) {
  if (type == 1) return !rows_of(*w, rows, count, (bf16*)to, threads, entry);
  if (type == 2) return !rows_of(*w, rows, count, (f16*)to, threads, entry);
  return !rows_of(*w, rows, count, (float*)to, threads, entry);
}
