// Rotary embedding of queries (in place) and keys, and the write of keys and values into the paged cache.
#include <algorithm>
#include "../simd.h"

namespace {
constexpr int64_t GRAIN = 8192;  // elements that are worth a thread

struct Call {
  void *q, *kv;
  const void *k, *v;
  const float *cos, *sin;
  const int64_t* slots;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head, slot_stride, tokens, capacity;
  int32_t heads, kv_heads, dim, block_tokens, layer, threads;
  parallel_entry entry;
};

// from and to may be the same; each vector is read before it is written.
template <class T> KC_INLINE void rotate(const T* from, const float* cos, const float* sin, int half, T* to) {
  for (int d = 0; d < half; d += W) {
    const int left = half - d;
    const vf a = load_part(from + d, left), b = load_part(from + half + d, left);
    const vf c = load_part(cos + d, left), s = load_part(sin + d, left);
    store_part(to + d, a * c - b * s, left);
    store_part(to + half + d, b * c + a * s, left);
  }
}

template <class T> void run(const Call& c) {
  const int half = c.dim / 2;
  const int64_t work = c.tokens * (c.heads + 2 * c.kv_heads) * c.dim;
  const int threads = (int)std::min<int64_t>(c.threads, work / GRAIN);
  shared_range(c.entry, threads, c.tokens, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      const float *cos = c.cos + t * half, *sin = c.sin + t * half;
      for (int h = 0; h < c.heads; h++) {
        T* q = (T*)c.q + t * c.q_token + h * c.q_head;
        rotate(q, cos, sin, half, q);
      }
      const int64_t slot = c.slots[t] / c.block_tokens, offset = c.slots[t] % c.block_tokens;
      T* block = (T*)c.kv + slot * c.slot_stride + (int64_t)c.layer * 2 * c.kv_heads * c.block_tokens * c.dim;
      for (int h = 0; h < c.kv_heads; h++) {
        rotate((const T*)c.k + t * c.k_token + h * c.k_head, cos, sin, half, block + (h * (int64_t)c.block_tokens + offset) * c.dim);
        T* to = block + ((c.kv_heads + h) * (int64_t)c.block_tokens + offset) * c.dim;
        memcpy(to, (const T*)c.v + t * c.v_token + h * c.v_head, sizeof(T) * c.dim);
      }
    }
  });
}
}  // namespace

// type: 0 float32, 1 bfloat16, 2 float16. Returns 1, with nothing done, where a slot lies outside the cache.
extern "C" int kimicore_rotary_write(const Call* c, int type) {
  for (int64_t t = 0; t < c->tokens; t++)
    if (c->slots[t] < 0 || c->slots[t] >= c->capacity) return 1;
  if (type == 0) run<float>(*c);
  else if (type == 1) run<bf16>(*c);
  else run<f16>(*c);
  return 0;
}
