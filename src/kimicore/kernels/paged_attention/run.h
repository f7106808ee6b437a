// Attention over a paged key-value cache: the work of a step cut into tasks, and shared among threads. See parts.h.
#pragma once
#include <algorithm>
#include <atomic>
#include <new>
#include <vector>
#include "parts.h"

namespace {
constexpr size_t PARTS_BYTES = 32u << 20;  // kept at most for parts that are computed side by side
constexpr int PACKING = 32;                // packing a key takes as long as so many rows take with it

enum Fault { FINE = 0, BAD_ROWS = 1, BAD_CONTEXT = 2, BAD_SLOT = 3, NO_MEMORY = 4, MANY_QUERIES = 5 };

struct Measured {  // the last query's weights per block, each relative to its part's maximum
  std::vector<float> mass, part_max, top, total;
  int parts = 0;
};

// Whether the row's tables name slots of the caches, for what its queries from the oldest on read.
bool slots_are_there(const Call& c, int row, int oldest, int context) {
  const int seen = (c.window > 0 && oldest >= c.window ? oldest - c.window + 1 : 0) / c.block_tokens;
  const int last = (context - 1) / c.block_tokens;
  for (int h = 0; h < (c.table_head ? c.kv_heads : 1); h++)
    for (int n = c.bits ? oldest / c.block_tokens : seen; n <= last; n++) {
      const int32_t slot = c.table[row * c.table_stride + h * c.table_head + n];
      if (slot < 0 || slot >= c.slots) return false;
    }
  for (int n = seen; c.bits && n < last; n++) {
    const int32_t slot = c.packed_table[row * c.packed_table_stride + n];
    if (slot < 0 || slot >= c.packed_slots) return false;
  }
  return true;
}

int checked_tasks(const Call& c, std::vector<Task>& tasks) {
  const int group = c.heads / c.kv_heads, tile = std::max(1, ROWS / group);
  for (int b = 0; b < c.rows; b++) {
    const int first = c.starts[b], last = c.starts[b + 1], context = c.contexts[b];
    if (first < 0 || last < first || last > c.tokens) return BAD_ROWS;
    if (first == last || context <= 0) continue;
    if (context < last - first || (int64_t)context > (int64_t)c.blocks * c.block_tokens) return BAD_CONTEXT;
    if (c.table_head && last - first != 1) return MANY_QUERIES;
    const int oldest = context - (last - first);
    if (!slots_are_there(c, b, oldest, context)) return BAD_SLOT;
    const size_t before = tasks.size();
    for (int i = first, next; i < last; i = next) {
      next = std::min(last, i + tile);
      if (c.bits) next = std::min(next, i + c.block_tokens - (oldest + i - first) % c.block_tokens);
      for (int h = c.kv_heads - 1; h >= 0; h--) {
        const int32_t* table = c.table + b * c.table_stride + h * c.table_head;
        tasks.push_back({b, h, i, next, oldest + i - first, table});
      }
    }
    std::reverse(tasks.begin() + before, tasks.end());  // the longest first
  }
  return FINE;
}

template <class T> void clear_unused(const Call& c) {  // tokens that belong to no row
  const size_t size = (size_t)c.heads * c.dim * sizeof(T);
  int at = 0;
  for (int b = 0; b <= c.rows; b++) {
    const int first = b < c.rows ? c.starts[b] : c.tokens;
    if (first > at) memset((char*)c.out + at * size, 0, (first - at) * size);
    if (b == c.rows) break;
    at = std::max(at, c.starts[b + 1]);
    if (c.contexts[b] <= 0 && c.starts[b + 1] > first) memset((char*)c.out + first * size, 0, (at - first) * size);
  }
}

template <class T, class P, bool PACKED> struct Run {
  const Attention<T, P, PACKED> part;
  const Call& c;
  std::vector<Task> tasks;
  Measured measured;
  std::atomic<int> failed{0};

  explicit Run(const Call& call) : part(call), c(call) {}

  bool measures(const Task& t) const { return c.importance && t.last == c.starts[t.row + 1]; }
  int rows(const Task& t) const { return (t.last - t.first) * part.group; }
  // Of its keys, each of which is packed once and weighed by every row.
  int64_t cost(const Task& t) const { return (int64_t)(rows(t) + PACKING) * (part.end_part(t) - part.lowest(t.at)); }
  size_t index(const Task& t) const { return (size_t)t.row * c.heads + t.head * part.group; }

  void note(const Task& t, int base, const float* part_max) {
    for (int g = 0; g < part.group; g++)
      measured.part_max[(index(t) + g) * measured.parts + base / SPLIT] = part_max[rows(t) - part.group + g];
  }
  void conclude(const Task& t, const float* top, const float* total) {
    for (int g = 0; g < part.group; g++) {
      measured.top[index(t) + g] = top[rows(t) - part.group + g];
      measured.total[index(t) + g] = total[rows(t) - part.group + g];
    }
  }
  float* mass(const Task& t) { return measures(t) ? measured.mass.data() + index(t) * c.blocks : nullptr; }

  void whole(const Task& t, Ahead& ahead) {
    const int n = rows(t), padded = part.padded;
    Work<P> w = part.carve(n);
    if (!w.q) { failed = 1; return; }
    part.pack_queries(t, w.q);
    memset(w.sum, 0, sizeof(float) * n * padded);
    float* total = w.total;
    for (int r = 0; r < n; r++) { w.max[r] = -INFINITY; total[r] = 0; }
    for (int base = part.first_part(t); base < part.end_part(t); base += SPLIT) {
      if (ahead.task == &t) ahead.key = std::max(ahead.key, base + SPLIT);  // this part is read at once
      part.part(t, w, base, measures(t), mass(t), ahead);
      if (measures(t)) note(t, base, w.part_max);
      for (int r = 0; r < n; r++)
        if (part.sees(t, r, base))
          part.combine(w.sum + (size_t)r * padded, w.max[r], total[r], w.part + (size_t)r * padded, w.part_max[r], w.part_sum[r]);
    }
    for (int r = 0; r < n; r++) part.finish(t, r, w.sum + (size_t)r * padded, total[r]);
    if (measures(t)) conclude(t, w.max, total);
  }

  // Parts of one task side by side, then combined in order.
  struct Item { int task, base; size_t at; };
  void one_part(const Item& item, Ahead ahead, float* parts) {
    const Task& t = tasks[item.task];
    const int n = rows(t), padded = part.padded;
    Work<P> w = part.carve(n);
    if (!w.q) { failed = 1; return; }
    part.pack_queries(t, w.q);
    part.part(t, w, item.base, measures(t), mass(t), ahead);
    if (measures(t)) note(t, item.base, w.part_max);
    float* to = parts + item.at;
    for (int r = 0; r < n; r++, to += padded + 2) {
      memcpy(to, w.part + (size_t)r * padded, sizeof(float) * padded);
      to[padded] = w.part_max[r];
      to[padded + 1] = w.part_sum[r];
    }
  }
  void join(const Item* items, int count, const float* parts) {
    const Task& t = tasks[items[0].task];
    const int n = rows(t), padded = part.padded;
    Work<P> w = part.carve(n);
    if (!w.q) { failed = 1; return; }
    float* total = w.total;
    for (int r = 0; r < n; r++) {
      float* sum = w.sum + (size_t)r * padded;
      memset(sum, 0, sizeof(float) * padded);
      w.max[r] = -INFINITY;
      total[r] = 0;
      for (int i = 0; i < count; i++) {
        const float* from = parts + items[i].at + (size_t)r * (padded + 2);
        if (part.sees(t, r, items[i].base)) part.combine(sum, w.max[r], total[r], from, from[padded], from[padded + 1]);
      }
      part.finish(t, r, sum, total[r]);
    }
    if (measures(t)) conclude(t, w.max, total);
  }

  template <class F> void share(int count, F&& each) {
    std::atomic<int> next{0};
    on_threads(c.entry, std::min(c.threads, count), [&] {
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) each(i);
    });
  }

  void add_importance() {
    for (int b = 0; b < c.rows; b++) {
      if (c.starts[b + 1] == c.starts[b]) continue;
      for (int h = 0; h < c.heads; h++) {
        const size_t i = (size_t)b * c.heads + h;
        if (!(measured.total[i] > 0)) continue;
        for (int n = 0; n < c.blocks && n * c.block_tokens < c.contexts[b]; n++) {
          const float top = measured.part_max[i * measured.parts + n * c.block_tokens / SPLIT];
          if (top == -INFINITY) continue;
          const float share = exp(splat(top - measured.top[i]))[0] / measured.total[i];
          c.importance[(size_t)b * c.blocks + n] += measured.mass[i * c.blocks + n] * share;
        }
      }
    }
  }

  int go() {
    if (int fault = checked_tasks(c, tasks)) return fault;
    clear_unused<T>(c);
    if (c.importance) {
      const size_t heads = (size_t)c.rows * c.heads;
      measured.parts = (int)(((int64_t)c.blocks * c.block_tokens + SPLIT - 1) / SPLIT);
      measured.mass.assign(heads * c.blocks, 0.f);
      measured.part_max.assign(heads * measured.parts, -INFINITY);
      measured.top.assign(heads, -INFINITY);
      measured.total.assign(heads, 0.f);
    }
    // A task that is long beside all the others together is cut into its parts, so that no thread is left with it at the end.
    int64_t all = 0;
    for (const Task& t : tasks) all += cost(t);
    const int64_t much = c.threads > 1 ? all / (4 * (int64_t)c.threads) : all;
    const auto cut = std::stable_partition(tasks.begin(), tasks.end(), [&](const Task& t) { return cost(t) > much; });
    const Task* rest = tasks.data() + (cut - tasks.begin());
    std::vector<Item> items;
    std::vector<int> bounds{0};
    size_t floats = 0;
    for (int i = 0; &tasks[i] < rest; i++) {
      for (int base = part.first_part(tasks[i]); base < part.end_part(tasks[i]); base += SPLIT) {
        items.push_back({i, base, floats});
        floats += (size_t)rows(tasks[i]) * (part.padded + 2);
      }
      bounds.push_back((int)items.size());
    }
    if (items.size() < bounds.size() || floats * sizeof(float) > PARTS_BYTES) {  // nothing to cut, or too much to keep
      items.clear();
      bounds.resize(1);
      rest = tasks.data();
    }
    std::vector<float> parts(items.empty() ? 0 : floats);
    const Task* end = tasks.data() + tasks.size();
    const int pieces = (int)items.size(), count = (int)(end - rest);
    const int run = std::max(1, std::min(16, count / (8 * std::max(c.threads, 1))));
    share(pieces + (count + run - 1) / run, [&](int i) {
      if (i < pieces) {
        const bool more = i + c.threads < pieces;  // this thread's next, if all are equally fast
        const Task* next = more ? &tasks[items[i + c.threads].task] : nullptr;
        return one_part(items[i], Ahead{next, next + more, more ? items[i + c.threads].base : 0}, parts.data());
      }
      const Task *at = rest + (i - pieces) * run, *stop = std::min(end, at + run);  // neighbours on one thread,
      Ahead ahead{at, stop, 0};                                                     // so that it knows what comes next
      for (; at < stop; at++) whole(*at, ahead);
    });
    share((int)bounds.size() - 1, [&](int i) { join(&items[bounds[i]], bounds[i + 1] - bounds[i], parts.data()); });
    if (failed) return NO_MEMORY;
    if (c.importance) add_importance();
    return FINE;
  }
};

template <class T, class P, bool PACKED> int run(const Call& c) {
  try {
    return Run<T, P, PACKED>(c).go();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

// type: 0 float32, 1 bfloat16, 2 float16. Returns 0, or which argument is wrong (see Fault).
template <bool PACKED> int run_type(const Call& c, int type) {
  if (type == 0) return run<float, WidePair, PACKED>(c);
  if (type == 2) return run<f16, WidePair, PACKED>(c);
#if defined(KC_BF16_DOT)
  return run<bf16, HalfPair, PACKED>(c);
#else
  return run<bf16, WidePair, PACKED>(c);
#endif
}
}  // namespace
