// Which blocks of a paged cache a query attends to: a score for each block by its least and largest keys, then the blocks
// with the largest estimates. A score depends on nothing but its query and its block, and each head's choice on its scores
// alone, so a row chooses the same in every batch and with any number of threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>
#include <vector>
#include "../simd.h"

namespace {
constexpr int64_t GRAIN = 1 << 17;  // products of a query and a summary's element that are worth a thread
constexpr int ITEM_BLOCKS = 64;     // blocks of one piece of work, a multiple of W
constexpr float RANGE = 0.25f;      // how much of a channel's range counts

enum Fault { FINE = 0, BAD_CONTEXT = 1, BAD_SLOT = 2, NO_MEMORY = 3 };

struct Call {
  const void *q, *summary;
  int32_t *table, *chosen;
  const int32_t *block_table, *contexts, *keep;
  int64_t q_row, q_head, slot_stride, table_stride;
  int32_t rows, heads, kv_heads, dim, blocks, block_tokens, slots, layer, first, recent, threads;
  float scale;
  parallel_entry entry;
};
struct Row { int blocks, kept, rivals; size_t at; };  // rivals: blocks that must be judged; at: their bounds
struct Item { int row, head, low, high; };            // rivals [low, high)

thread_local Scratch bounds, queries;

constexpr int whole(int n) { return (n + W - 1) / W * W; }

template <class T> struct Run {
  const Call& c;
  const int group, wide, padded;  // elements of a summary; the same up to whole vectors
  std::vector<Row> rows;
  std::vector<Item> items;
  std::unique_ptr<std::atomic<int>[]> open;  // per row and kv head: pieces that are not done
  size_t floats = 0;
  float* shared_bounds = nullptr;  // [rows][heads][rivals up to whole vectors], in memory of the thread that calls
  int most = 0;                    // blocks that any row keeps
  std::atomic<int> failed{0};

  explicit Run(const Call& call)
      : c(call), group(call.heads / call.kv_heads), wide(2 * call.dim), padded(whole(2 * call.dim)) {}

  int plan() {
    rows.reserve(c.rows);
    open.reset(new std::atomic<int>[(size_t)c.rows * c.kv_heads]);
    for (int b = 0; b < c.rows; b++) {
      const int64_t context = std::max(c.contexts[b], 0);
      if (context > (int64_t)c.blocks * c.block_tokens) return BAD_CONTEXT;
      const int n = (int)((context + c.block_tokens - 1) / c.block_tokens);
      for (int i = 0; i < n; i++) {
        const int32_t slot = c.block_table[b * c.table_stride + i];
        if (slot < 0 || slot >= c.slots) return BAD_SLOT;
      }
      const int kept = (int)std::min<int64_t>(n, std::max<int64_t>(c.keep[b], (int64_t)c.first + c.recent));
      const int rivals = kept < n && kept > c.first + c.recent ? n - c.first - c.recent : 0;
      c.chosen[b] = (int32_t)(context - (int64_t)(n - kept) * c.block_tokens);
      for (int h = 0; rivals && h < c.kv_heads; h++) {
        open[(size_t)b * c.kv_heads + h] = (rivals + ITEM_BLOCKS - 1) / ITEM_BLOCKS;
        for (int i = 0; i < rivals; i += ITEM_BLOCKS) items.push_back({b, h, i, std::min(i + ITEM_BLOCKS, rivals)});
      }
      rows.push_back({n, kept, rivals, floats});
      floats += (size_t)c.heads * whole(rivals);
      most = std::max(most, kept);
    }
    return FINE;
  }

  const int32_t* rivals(int row) const { return c.block_table + row * c.table_stride + c.first; }
  float* bound(int row, int head) const {
    return shared_bounds + rows[row].at + (size_t)head * group * whole(rows[row].rivals);
  }

  // to[h][0 .. W) = bounds of W blocks by M heads. Two blocks share each load of a query; every sum is one chain.
  template <int M> void bounds_of(const float* q, const T* const* blocks, float* to, size_t stride) const {
    vf sums[M][W];
    for (int b = 0; b < W; b += 2) {
      vf even[M] = {}, odd[M] = {};
      const T *a = blocks[b], *z = blocks[b + 1];
      const auto add = [&](int e, vf u, vf v) __attribute__((always_inline)) {
        for (int h = 0; h < M; h++) {
          const vf own = load(q + (size_t)h * padded + e);
          even[h] = fma(own, u, even[h]);
          odd[h] = fma(own, v, odd[h]);
        }
      };
      int e = 0;
      for (; e + W <= wide; e += W) add(e, load(a + e), load(z + e));
      if (e < wide) add(e, load_part(a + e, wide - e), load_part(z + e, wide - e));
      for (int h = 0; h < M; h++) sums[h][b] = even[h], sums[h][b + 1] = odd[h];
    }
    for (int h = 0; h < M; h++) {
      transpose(sums[h]);
      for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; i++) sums[h][i] += sums[h][i + n];
      const vf score = splat(c.scale) * sums[h][0], zero = score - score;
      store(to + h * stride, zero == zero ? score : splat(NAN));
    }
  }

  // The queries of a kv head, each as the weights of the minima and then those of the maxima.
  bool prepare(const Item& one, float*& q) const {
    q = (float*)queries.need((size_t)group * padded * sizeof(float));
    if (!q) return false;
    for (int h = 0; h < group; h++) {
      const T* from = (const T*)c.q + one.row * c.q_row + (one.head * group + h) * c.q_head;
      float* to = q + (size_t)h * padded;
      for (int d = 0; d < c.dim; d++) {
        const float x = widen(from[d]);
        const float wide = RANGE * std::fabs(x);
        to[d] = 0.5f * (x - wide);
        to[c.dim + d] = 0.5f * (x + wide);
      }
      std::fill(to + wide, to + padded, 0.f);
    }
    return true;
  }

  void item(const Item& one) {
    float* q;
    if (!prepare(one, q)) { failed = 1; return; }
    const size_t stride = whole(rows[one.row].rivals);
    const T* base = (const T*)c.summary + ((int64_t)c.layer * c.kv_heads + one.head) * wide;
    const int32_t* slots = rivals(one.row);
    for (int i = one.low; i < one.high; i += W) {
      const T* blocks[W];
      for (int b = 0; b < W; b++) blocks[b] = base + slots[std::min(i + b, one.high - 1)] * c.slot_stride;
      float* to = bound(one.row, one.head) + i;
      for (int h = 0, m; h < group; h += m) {
        m = std::min(4, group - h);
        const float* own = q + (size_t)h * padded;
        if (m == 4) bounds_of<4>(own, blocks, to + h * stride, stride);
        else if (m == 3) bounds_of<3>(own, blocks, to + h * stride, stride);
        else if (m == 2) bounds_of<2>(own, blocks, to + h * stride, stride);
        else bounds_of<1>(own, blocks, to + h * stride, stride);
      }
    }
    if (open[(size_t)one.row * c.kv_heads + one.head].fetch_sub(1, std::memory_order_acq_rel) == 1)
      choose(one.row, one.head);
  }

  // Scores to estimates, as integers of the same order: a NaN is above all, and lanes behind the last rival below.
  void estimate(int row, int head) const {
    const int count = rows[row].rivals, stride = whole(count);
    float* from = bound(row, head);
    for (int i = count; i < stride; i++)
      for (int h = 0; h < group; h++) from[(size_t)h * stride + i] = -INFINITY;
    for (int h = 0; h < group; h++) {
      float* own = from + (size_t)h * stride;
      vf highest = splat(-INFINITY);
      for (int i = 0; i < stride; i += W) highest = max(load(own + i), highest);  // leaves NaN out
      const float found = lanes_max(highest), top = found == -INFINITY ? 0.f : found;
      vf total{};
      for (int i = 0; i < stride; i += W) {
        const vf weight = exp(load(own + i) - top);
        store(own + i, weight);
        total = total + (weight == weight ? weight : vf{});
      }
      const float sum = lanes_sum(total), part = sum > 0 ? 1.f / sum : 1.f;
      for (int i = 0; i < stride; i += W) store(from + i, h ? load(from + i) + load(own + i) * part : load(own + i) * part);
    }
    for (int i = 0; i < stride; i += W) {
      const vf sum = load(from + i);
      vi order = sum == sum ? (vi)sum : vi{} + 0x7fffffff;
      order = iota() + i < count ? order : vi{} - 1;
      memcpy(from + i, &order, sizeof order);
    }
  }

  static int at_least(const int32_t* order, int count, int32_t limit) {
    vi found{};
    for (int i = 0; i < count; i += W) {
      vi one;
      memcpy(&one, order + i, sizeof one);
      found -= one >= limit;
    }
    int sum = 0;
    for (int i = 0; i < W; i++) sum += found[i];
    return sum;
  }

  // The limit that as many rivals reach as there are places, bit by bit: up to 31 passes of few instructions take less
  // time than a partition, whose branches nobody can foresee.
  void choose(int row, int head) const {
    const Row& r = rows[row];
    const int places = r.kept - c.first - c.recent, stride = whole(r.rivals);
    estimate(row, head);
    const int32_t *order = (const int32_t*)bound(row, head), *slots = rivals(row);
    int32_t limit = 0;
    int spare = r.rivals - places;  // how many too many reach the limit: the first of those at it find no place
    for (int32_t bit = 1 << 30; bit && spare; bit >>= 1) {
      const int more = at_least(order, stride, limit | bit) - places;
      if (more >= 0) limit |= bit, spare = more;
    }
    int32_t* to = c.table + ((size_t)row * c.kv_heads + head) * most;
    std::copy(slots - c.first, slots, to);
    int32_t* next = to + c.first;
    for (int i = 0; i < r.rivals; i++) {
      const int equal = order[i] == limit, left_out = equal & (spare > 0);
      spare -= left_out;
      *next = slots[i];  // at worst into a place of the recent ones, which follow
      next += (order[i] >= limit) & !left_out;
    }
    std::copy(slots + r.rivals, slots + r.rivals + c.recent, to + r.kept - c.recent);
    std::fill(to + r.kept, to + most, 0);
  }

  // All blocks, or where there are no other places, the first and the recent ones.
  void keep_ends(int row) const {
    const int32_t* from = c.block_table + row * c.table_stride;
    const int n = rows[row].blocks, kept = rows[row].kept, low = std::min(c.first, kept);
    for (int h = 0; h < c.kv_heads; h++) {
      int32_t* to = c.table + ((size_t)row * c.kv_heads + h) * most;
      std::copy(from, from + low, to);
      std::copy(from + n - (kept - low), from + n, to + low);
      std::fill(to + kept, to + most, 0);
    }
  }

  int go() {
    if (int fault = plan()) return -fault;
    if (floats && !bounds.need(floats * sizeof(float))) return -NO_MEMORY;
    shared_bounds = (float*)bounds.data;
    for (int b = 0; b < c.rows; b++)
      if (!rows[b].rivals) keep_ends(b);
    const int64_t useful = (int64_t)(floats * wide) / GRAIN;
    const int threads = (int)std::max<int64_t>(1, std::min<int64_t>({c.threads, useful, (int64_t)items.size()}));
    std::atomic<int> next{0};
    on_threads(c.entry, threads, [&] {
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < (int)items.size();) item(items[i]);
    });
    return failed ? -NO_MEMORY : most;
  }
};

template <class T> int run(const Call& c) {
  try {
    return Run<T>(c).go();
  } catch (const std::bad_alloc&) {
    return -NO_MEMORY;
  }
}
}  // namespace

// type: 0 float32, 1 bfloat16, 2 float16. Returns how wide the table is, or less than 0: which argument is wrong (see
// Fault). The table has room for [rows][kv_heads][blocks], and is written as [rows][kv_heads][what is returned].
extern "C" int kimicore_choose_blocks(const Call* c, int type) {
  if (type == 0) return run<float>(*c);
  if (type == 1) return run<bf16>(*c);
  return run<f16>(*c);
}
