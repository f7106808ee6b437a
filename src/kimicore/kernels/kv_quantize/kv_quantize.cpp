// Keys and values of whole blocks in 8 or 4 bits: the bytes that kv_quantize/reference.py describes, and no others.
#include <algorithm>
#include "../simd.h"

namespace {
constexpr int64_t GRAIN = 16384;  // elements that are worth a thread
constexpr float MOST = 65504.f;   // of float16

struct Call {
  const void* kv;
  uint8_t* packed;
  const int32_t *sources, *targets;
  int64_t slot_stride, packed_stride, value_codes, key_scales, value_scales, layer_bytes, count;
  int32_t slots, packed_slots, kv_heads, dim, block_tokens, layer, bits, threads;
  parallel_entry entry;
};
struct Scale { f16 minimum, step; };

KC_INLINE f16 rounded_down(float x) {
  f16 h;
  narrow(x, &h);
  if (widen(h) > x) h.bits = (uint16_t)(h.bits & 0x8000 ? h.bits + 1 : h.bits - 1);
  return h;
}
KC_INLINE f16 rounded_up(float x) {  // of a number that is not negative; at least the least one above 0
  f16 h;
  narrow(x, &h);
  if (widen(h) < x) h.bits++;
  h.bits = std::max<uint16_t>(h.bits, 1);
  return h;
}
// zero: x - x of all of a group's values added up, which is not 0 where one of them is not finite.
KC_INLINE Scale scale_of(float least, float greatest, float zero, float levels) {
  if (zero != 0) return {{0}, {0x7e00}};
  const f16 minimum = rounded_down(std::min(std::max(least + 0.f, -MOST), MOST));
  const float spread = greatest - widen(minimum);
  if (!(spread > 0)) return {minimum, {0}};
  return {minimum, rounded_up(std::min(spread / levels, MOST))};
}
KC_INLINE vi codes_of(vf x, vf minimum, vf step, float levels) {
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  vf steps = (x - minimum) / step;
  steps = steps > 0.f ? steps : vf{};
  steps = steps < levels ? steps : splat(levels);
  return step > 0.f ? (vi)(steps + magic) - (vi)magic : vi{};
}
KC_INLINE void store_bytes(uint8_t* p, vi v, int n) {
  uint8_t some[W];
#if defined(KC_AVX512)
  const __m128i b = _mm512_cvtepi32_epi8((__m512i)v);
  memcpy(some, &b, sizeof b);
#else
  for (int i = 0; i < W; i++) some[i] = (uint8_t)v[i];
#endif
  memcpy(p, some, n >= W ? (size_t)W : (size_t)n);
}
// W channels from d on, of which `left` belong to the token (or to its lower half); a byte of 4 bits takes those of its
// upper half as well.
template <class T, class F> KC_INLINE void store_codes(const T* from, int half, int bits, int d, int left, uint8_t* to, F&& codes) {
  vi v = codes(load_part(from + d, left), d);
  if (bits == 4) v = v | codes(load_part(from + half + d, left), half + d) << 4;
  store_bytes(to + d, v, left);
}

template <class T> void keys(const T* from, uint8_t* codes, f16* scales, const Call& c) {
  const int dim = c.dim, bytes = dim * c.bits / 8, tokens = c.block_tokens;
  const float levels = (float)((1 << c.bits) - 1);
  for (int d = 0; d < dim; d += W) {
    const int left = std::min(dim - d, W);
    vf least = load_part(from + d, left), greatest = least, zero{};
    for (int i = 0; i < tokens; i++) {
      const vf v = load_part(from + (size_t)i * dim + d, left);
      least = v < least ? v : least;
      greatest = v > greatest ? v : greatest;
      zero = zero + (v - v);
    }
    for (int i = 0; i < left; i++) {
      const Scale s = scale_of(least[i], greatest[i], zero[i], levels);
      scales[d + i] = s.minimum;
      scales[dim + d + i] = s.step;
    }
  }
  for (int d = 0; d < bytes; d += W) {
    const int left = std::min(bytes - d, W), upper = c.bits == 4 ? dim / 2 + d : d;
    const vf low = load_part(scales + d, left), step = load_part(scales + dim + d, left);
    const vf upper_low = load_part(scales + upper, left), upper_step = load_part(scales + dim + upper, left);
    for (int i = 0; i < tokens; i++)
      store_codes(from + (size_t)i * dim, dim / 2, c.bits, d, left, codes + (size_t)i * bytes, [&](vf x, int at) {
        return at == d ? codes_of(x, low, step, levels) : codes_of(x, upper_low, upper_step, levels);
      });
  }
}

template <class T> void values(const T* from, uint8_t* codes, f16* scales, const Call& c) {
  const int dim = c.dim, bytes = dim * c.bits / 8;
  const float levels = (float)((1 << c.bits) - 1);
  for (int i = 0; i < c.block_tokens; i++, from += dim, codes += bytes) {
    vf least = splat(widen(from[0])), greatest = least, zero{};
    for (int d = 0; d < dim; d += W) {
      vf v = load_part(from + d, dim - d);
      if (dim - d < W) v = iota() < dim - d ? v : splat(widen(from[0]));
      least = v < least ? v : least;
      greatest = v > greatest ? v : greatest;
      zero = zero + (v - v);
    }
    const Scale s = scale_of(-lanes_max(-least), lanes_max(greatest), lanes_sum(zero), levels);
    scales[2 * i] = s.minimum;
    scales[2 * i + 1] = s.step;
    const vf low = splat(widen(s.minimum)), step = splat(widen(s.step));
    for (int d = 0; d < bytes; d += W)
      store_codes(from, dim / 2, c.bits, d, std::min(bytes - d, W), codes, [&](vf x, int) { return codes_of(x, low, step, levels); });
  }
}

template <class T> void run(const Call& c) {
  const int64_t head = (int64_t)c.block_tokens * c.dim, head_bytes = head * c.bits / 8;
  const int threads = (int)std::max<int64_t>(1, std::min<int64_t>(c.threads, c.count * c.kv_heads * 2 * head / GRAIN));
  shared_range(c.entry, threads, c.count * c.kv_heads, [&](int64_t first, int64_t last) {
    for (int64_t at = first; at < last; at++) {
      const int64_t n = at / c.kv_heads, h = at % c.kv_heads;
      const T* from = (const T*)c.kv + c.sources[n] * c.slot_stride + ((int64_t)c.layer * 2 * c.kv_heads + h) * head;
      uint8_t* to = c.packed + c.targets[n] * c.packed_stride + c.layer * c.layer_bytes;
      keys(from, to + h * head_bytes, (f16*)(to + c.key_scales) + h * 2 * c.dim, c);
      values(from + c.kv_heads * head, to + c.value_codes + h * head_bytes, (f16*)(to + c.value_scales) + h * 2 * c.block_tokens, c);
      const int64_t end = c.value_scales + (int64_t)c.kv_heads * c.block_tokens * sizeof(Scale);
      if (h == 0) memset(to + end, 0, (size_t)(c.layer_bytes - end));
    }
  });
}
}  // namespace

// type: 0 float32, 1 bfloat16, 2 float16. Returns 1, with nothing done, where a slot lies outside of its cache.
extern "C" int kimicore_kv_quantize(const Call* c, int type) {
  for (int64_t n = 0; n < c->count; n++)
    if (c->sources[n] < 0 || c->sources[n] >= c->slots || c->targets[n] < 0 || c->targets[n] >= c->packed_slots) return 1;
  if (type == 0) run<float>(*c);
  else if (type == 1) run<bf16>(*c);
  else run<f16>(*c);
  return 0;
}
