// What an attention is asked for, and what one thread keeps while it goes over the keys of a task. See parts.h.
#pragma once
#include <type_traits>
#include "../simd.h"

namespace {
// Products: float32, or pairs of bfloat16 where the processor multiplies those.
struct WidePair {
  typedef float Q;  // what a packed operand's element is
  static constexpr int depth = 1;
  KC_INLINE vf step(vf sum, Q a, vf b) { return fma(splat(a), b, sum); }
};
#if defined(__AVX512BF16__) && defined(KC_AVX512)
#define KC_BF16_DOT 1
struct HalfPair {
  typedef uint32_t Q;
  static constexpr int depth = 2;
  KC_INLINE vf step(vf sum, Q a, vf b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
  }
};
#endif

struct Call {
  const void *q, *kv;
  void* out;
  const int32_t *table, *starts, *contexts;
  const float* bias;
  float* importance;
  const uint8_t* packed;  // blocks before a query's own one, where bits is not 0
  const int32_t* packed_table;
  int64_t q_token, q_head, slot_stride, table_stride, table_head, bias_stride;  // table_head: 0 where heads share a table
  int64_t packed_stride, packed_table_stride, value_codes, key_scales, value_scales, layer_bytes;  // kv_quantize/layout.py
  int32_t tokens, heads, kv_heads, dim, rows, blocks, block_tokens, slots, layers, layer, window, threads, bits, packed_slots;
  float scale, softcap;
  parallel_entry entry;
};
struct Task { int row, head, first, last, at; const int32_t* table; };  // tokens [first, last) of q; the first one's position

thread_local Scratch scratch, unpacked;  // the latter: W tokens of a packed block

// Memory is asked for ahead of its use, a line at a time between other work (asked for at once, the requests queue up and
// nothing else goes on): values while the keys before them are packed, and the next keys, of this or of the next task, while
// values are packed.
struct Ahead { const Task *task, *end; int key; };

// What one task keeps while it goes over its keys.
template <class P> struct Work {
  typename P::Q *q, *keys, *values;  // [rows][depth], [depth][SUB], [SUB / pair][padded dim]
  float *scores, *part, *part_max, *part_sum, *sum, *max, *total;
};
}  // namespace
