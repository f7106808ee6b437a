// How much attention each block of a paged cache gets from a few queries: their products with the keys once more, and for
// each query, head and block the sum of weights relative to the block's own maximum. What a row gets depends on nothing
// but the row: every block is weighed by itself, and blocks, heads and queries are joined in one order.
#include <algorithm>
#include <atomic>
#include <new>
#include <vector>
#include "../simd.h"

namespace {
constexpr int64_t GRAIN = 1 << 16;  // products of a query and a key's element that are worth a thread
constexpr int ITEM_KEYS = 512;      // keys of one piece of work
constexpr int PACK = 64;            // keys packed at a time, a whole block at least

enum Fault { FINE = 0, BAD_ROWS = 1, BAD_CONTEXT = 2, BAD_SLOT = 3, NO_MEMORY = 4 };

struct Call {
  const void *q, *kv;
  float* mass;
  const int32_t *table, *starts, *contexts;
  int64_t q_token, q_head, slot_stride, table_stride;
  int32_t tokens, heads, kv_heads, dim, rows, blocks, block_tokens, slots, layer, window, threads;
  float scale, softcap;
  parallel_entry entry;
};
struct Row { int index, first, count, oldest, low, high; size_t at; };  // blocks [low, high); where its parts lie
struct Item { int row, head, low, high; };

thread_local Scratch scratch;

template <class T> struct Run {
  const Call& c;
  const int group, bt;
  std::vector<Row> rows;
  std::vector<Item> items;
  std::vector<float> top, sum;  // per row: [heads][queries][blocks]
  std::atomic<int> failed{0};

  explicit Run(const Call& call) : c(call), group(call.heads / call.kv_heads), bt(call.block_tokens) {}

  int plan() {
    size_t parts = 0;
    for (int b = 0; b < c.rows; b++) {
      const int first = c.starts[b], last = c.starts[b + 1], context = c.contexts[b];
      if (first < 0 || last < first || last > c.tokens) return BAD_ROWS;
      if (first == last || context <= 0) continue;
      if (context < last - first || (int64_t)context > (int64_t)c.blocks * bt) return BAD_CONTEXT;
      const int oldest = context - (last - first);
      const int low = (c.window > 0 && oldest >= c.window ? oldest - c.window + 1 : 0) / bt, high = (context + bt - 1) / bt;
      for (int n = low; n < high; n++) {
        const int32_t slot = c.table[b * c.table_stride + n];
        if (slot < 0 || slot >= c.slots) return BAD_SLOT;
      }
      const int step = std::max(ITEM_KEYS / bt, 1);
      for (int h = 0; h < c.kv_heads; h++)
        for (int n = low; n < high; n += step) items.push_back({(int)rows.size(), h, n, std::min(n + step, high)});
      rows.push_back({b, first, last - first, oldest, low, high, parts});
      parts += (size_t)c.heads * (last - first) * (high - low);
    }
    top.resize(parts);
    sum.resize(parts);
    return FINE;
  }

  const T* keys(const Row& row, int head, int block) const {
    const int64_t slot = c.table[row.index * c.table_stride + block];
    return (const T*)c.kv + slot * c.slot_stride + ((int64_t)c.layer * 2 * c.kv_heads + head) * bt * c.dim;
  }

  // W keys that lie one behind the other, turned to [dim][W].
  void turn(const T* from, float* to) const {
    const int dim = c.dim;
    for (int d = 0; d < dim; d += W) {
      vf r[W];
      for (int i = 0; i < W; i++) r[i] = load_part(from + (size_t)i * dim + d, dim - d);
      transpose(r);
      for (int i = 0; i < W && d + i < dim; i++) store(to + (size_t)(d + i) * W, r[i]);
    }
  }

  // scores[M][N * W] = q[M][dim] * keys, in one chain over the dimension.
  template <int M, int N> void score(const float* q, const float* keys, float* scores, int stride) const {
    vf s[M][N] = {};
    const int dim = c.dim;
    for (int d = 0; d < dim; d++) {
      vf b[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) b[j] = load(keys + ((size_t)j * dim + d) * W);
#pragma GCC unroll 4
      for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) s[i][j] = fma(splat(q[(size_t)i * dim + d]), b[j], s[i][j]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) store(scores + (size_t)i * stride + j * W, s[i][j]);
  }
  template <int M> void score_row(const float* q, const float* keys, float* scores, int width, int stride) const {
    int k = 0;
    for (; k + TILE_VECS * W <= width; k += TILE_VECS * W) score<M, TILE_VECS>(q, keys + (size_t)k * c.dim, scores + k, stride);
    for (; k < width; k += W) score<M, 1>(q, keys + (size_t)k * c.dim, scores + k, stride);
  }

  // One query's weights in one block, whose first key stands at `at`, relative to their maximum.
  void weigh(float* s, int at, int low, int high, float& top, float& sum) const {
    vf most = splat(-INFINITY);
    for (int j = 0; j < bt; j += W) {
      vf v = load(s + j) * c.scale;
      if (c.softcap > 0) v = c.softcap * tanh(v / c.softcap);
      if (at + j < low || at + j + W > high) {
        const vi key = iota() + (at + j);
        v = (key >= low) & (key < high) ? v : splat(-INFINITY);
      }
      store(s + j, v);
      most = v > most ? v : most;  // a NaN is left to the sum
    }
    top = lanes_max(most);
    vf total{};
    for (int j = 0; j < bt; j += W) {
      const vf v = load(s + j);
      total = total + (top == -INFINITY ? (v == v ? vf{} : v) : exp(v - top));
    }
    sum = lanes_sum(total);
  }

  void item(const Item& one) {
    const Row& row = rows[one.row];
    const int dim = c.dim, few = row.count * group, pack = std::max(PACK / bt, 1);
    float* memory = (float*)scratch.need(((size_t)few * dim + (size_t)pack * bt * (dim + 4) + 64) * sizeof(float));
    if (!memory) { failed = 1; return; }
    float *turned = memory, *scores = turned + (size_t)pack * bt * dim, *q = scores + (size_t)4 * pack * bt;
    for (int r = 0; r < few; r++) {  // head after head: [group][queries]
      const T* from = (const T*)c.q + (row.first + r % row.count) * c.q_token + (one.head * group + r / row.count) * c.q_head;
      for (int d = 0; d < dim; d++) q[(size_t)r * dim + d] = widen(from[d]);
    }
    const int blocks = row.high - row.low;
    const size_t base = row.at + (size_t)one.head * group * row.count * blocks;
    for (int n = one.low; n < one.high; n += pack) {
      const int here = std::min(pack, one.high - n), width = here * bt;
      for (int k = 0; k < width; k += W)
        turn(keys(row, one.head, n + k / bt) + (size_t)(k % bt) * dim, turned + (size_t)k * dim);
      for (int r = 0, m; r < few; r += m) {
        m = std::min(4, few - r);
        const float* own = q + (size_t)r * dim;
        if (m == 4) score_row<4>(own, turned, scores, width, width);
        else if (m == 3) score_row<3>(own, turned, scores, width, width);
        else if (m == 2) score_row<2>(own, turned, scores, width, width);
        else score_row<1>(own, turned, scores, width, width);
        for (int i = 0; i < m; i++) {
          const int position = row.oldest + (r + i) % row.count, end = position + 1;
          const int begin = c.window > 0 && position >= c.window ? position - c.window + 1 : 0;
          const size_t to = base + (size_t)(r + i) * blocks + (n - row.low);
          for (int k = 0; k < here; k++)
            weigh(scores + (size_t)i * width + k * bt, (n + k) * bt, begin, end, top[to + k], sum[to + k]);
        }
      }
    }
  }

  void join(const Row& row) {
    float* mass = c.mass + (size_t)row.index * c.blocks + row.low;
    const int blocks = row.high - row.low, count = c.heads * row.count;
    for (int i = 0; i < count; i++) {
      float *most = top.data() + row.at + (size_t)i * blocks, *share = sum.data() + row.at + (size_t)i * blocks;
      float highest = -INFINITY, total = 0;
      for (int n = 0; n < blocks; n++) highest = std::max(highest, most[n]);
      for (int n = 0; n < blocks; n++) {
        share[n] = most[n] == -INFINITY ? share[n] : share[n] * exp(splat(most[n] - highest))[0];
        total += share[n];
      }
      const float part = 1.f / (total * count);
      for (int n = 0; n < blocks; n++) mass[n] += share[n] * part;
    }
  }

  template <class F> void share(int count, int threads, F&& each) {
    std::atomic<int> next{0};
    on_threads(c.entry, std::min(threads, count), [&] {
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) each(i);
    });
  }

  int go() {
    if (int fault = plan()) return fault;
    std::fill(c.mass, c.mass + (size_t)c.rows * c.blocks, 0.f);
    int64_t work = 0;
    for (const Row& row : rows) work += (int64_t)(row.count * group + 4) * c.kv_heads * (row.high - row.low) * bt * c.dim;
    const int threads = (int)std::max<int64_t>(1, std::min<int64_t>(c.threads, work / GRAIN));
    share((int)items.size(), threads, [&](int i) { item(items[i]); });
    if (failed) return NO_MEMORY;
    share((int)rows.size(), threads, [&](int i) { join(rows[i]); });
    return FINE;
  }
};

template <class T> int run(const Call& c) {
  try {
    return Run<T>(c).go();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}
}  // namespace

// type: 0 float32, 1 bfloat16, 2 float16. Returns 0, or which argument is wrong (see Fault).
extern "C" int kimicore_block_mass(const Call* c, int type) {
  if (type == 0) return run<float>(*c);
  if (type == 1) return run<bf16>(*c);
  return run<f16>(*c);
}
