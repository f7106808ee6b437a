// The least and the largest value of each channel over the keys of whole blocks.
#include <algorithm>
#include "../simd.h"

namespace {
constexpr int64_t GRAIN = 1 << 14;  // elements of keys that are worth a thread

struct Call {
  const void* kv;
  void* summary;
  const int32_t* slots;
  int64_t kv_stride, summary_stride, count;
  int32_t kv_heads, dim, block_tokens, capacity, layer, threads;
  parallel_entry entry;
};

template <class T> KC_INLINE void extremes(const T* keys, int tokens, int dim, T* to) {
  for (int d = 0; d < dim; d += W) {
    const int left = dim - d;
    vf low = load_part(keys + d, left), high = low;
    vi wrong = low != low;
    for (int t = 1; t < tokens; t++) {
      const vf key = load_part(keys + (size_t)t * dim + d, left);
      low = key < low ? key : low;
      high = high < key ? key : high;
      wrong |= key != key;
    }
    // -0 becomes +0, and every NaN the same, so that the bits do not depend on the order of keys
    store_part(to + d, wrong ? splat(NAN) : low + 0.f, left);
    store_part(to + dim + d, wrong ? splat(NAN) : high + 0.f, left);
  }
}

template <class T> void run(const Call& c) {
  const int64_t per_head = (int64_t)c.block_tokens * c.dim, items = c.count * c.kv_heads;
  const int threads = (int)std::max<int64_t>(1, std::min<int64_t>(c.threads, items * per_head / GRAIN));
  shared_range(c.entry, threads, items, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t slot = c.slots[i / c.kv_heads], head = i % c.kv_heads;
      const T* keys = (const T*)c.kv + slot * c.kv_stride + ((int64_t)c.layer * 2 * c.kv_heads + head) * per_head;
      T* to = (T*)c.summary + slot * c.summary_stride + ((int64_t)c.layer * c.kv_heads + head) * 2 * c.dim;
      extremes(keys, c.block_tokens, c.dim, to);
    }
  });
}
}  // namespace

// type: 0 float32, 1 bfloat16, 2 float16. Returns 1, with nothing done, where a slot lies outside the cache.
extern "C" int kimicore_key_summary(const Call* c, int type) {
  for (int64_t i = 0; i < c->count; i++)
    if (c->slots[i] < 0 || c->slots[i] >= c->capacity) return 1;
  if (type == 0) run<float>(*c);
  else if (type == 1) run<bf16>(*c);
  else run<f16>(*c);
  return 0;
}
