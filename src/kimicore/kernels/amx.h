// Products on processors with matrix tiles (Intel AMX): y [rows, outs] from x [rows, depth] and weights [outs, depth], both of
// bfloat16 or of 8-bit integers.
//
// A tile of weights, 16 outputs by 64 bytes, is read where it lies and is the left operand. Rows of x are packed once per
// call into right operands: 16 rows by 64 bytes with their 32-bit units transposed. So a result is one chain over the inner
// dimension, the same in every batch, and weights need no layout of their own.
#pragma once
#include <algorithm>
#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(KC_AVX512) && defined(__linux__)
#define KC_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

namespace amx {
constexpr int T = 16;                       // rows of a tile
constexpr int64_t CHUNK = 64, TILE = 1024;  // bytes: of a tile's row, of a tile
constexpr int PANEL = 2 * T;                // outputs whose sums are kept at once
constexpr int MOST_PANELS = 8;              // that rows pass by at once
constexpr int64_t SHARED_TILES = 256;       // packed by all threads from so many on

// Asks the system for leave to use tiles, which every thread of the process then has; whether it is given.
inline bool allowed() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

// Tiles are set up as long as this lives.
struct Tiles {
  struct alignas(64) Config {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  // Tiles 0 to 5, of sums and left operands, have `tall` rows.
  explicit Tiles(int tall = T) {
    Config config;
    for (int i = 0; i < 8; i++) config.bytes[i] = CHUNK, config.rows[i] = (uint8_t)(i < 6 ? tall : T);
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

KC_INLINE __m512i load_bytes(const char* p, int64_t n) {
  if (n >= CHUNK) return _mm512_loadu_si512(p);
  return n <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi8((__mmask64)((uint64_t{1} << n) - 1), p);
}

// Rows of x, `depth` bytes each, as right operands: tile (b, c) has rows 16 b to 16 b + 15, bytes 64 c to 64 c + 63.
struct Rows {
  const char* data;
  int64_t rows, chunks;
  const char* block(int64_t b) const { return data + b * chunks * TILE; }
};
inline void pack_tile(const char* x, int64_t row_bytes, int64_t rows, int64_t left, char* to) {
  vf t[W];
  for (int i = 0; i < T; i++) t[i] = i < rows ? (vf)load_bytes(x + i * row_bytes, left) : vf{};
  transpose(t);
#pragma GCC unroll 16
  for (int i = 0; i < T; i++) _mm512_store_si512(to + i * CHUNK, (__m512i)t[i]);
}
inline Rows pack_rows(
    const char* x, int64_t row_bytes, int64_t rows, int64_t depth, char* to, int threads, parallel_entry entry) {
  const int64_t chunks = (depth + CHUNK - 1) / CHUNK, tiles = (rows + T - 1) / T * chunks;
  shared_range(entry, tiles < SHARED_TILES ? 1 : threads, tiles, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      const int64_t b = t / chunks, c = t % chunks;
      pack_tile(x + b * T * row_bytes + c * CHUNK, row_bytes, rows - b * T, depth - c * CHUNK, to + t * TILE);
    }
  });
  return {to, rows, chunks};
}
inline int64_t packed_bytes(int64_t rows, int64_t depth) { return (rows + T - 1) / T * T * ((depth + CHUNK - 1) / CHUNK * CHUNK); }

// Where the weights of a panel lie: whole chunks from `at`, rows `row` bytes apart, and the last chunk where it is not whole
// [PANEL][64], zeros behind its end.
struct Weights {
  const char* at;
  int64_t row, whole;
  const char* tail;
};
// The last chunk of `outs` rows of `depth` bytes, for a panel.
inline void pack_tail(const char* at, int64_t row, int64_t outs, int64_t depth, char* tail) {
  const int64_t from = depth / CHUNK * CHUNK;
  for (int64_t i = 0; i < PANEL; i++)
    _mm512_storeu_si512(tail + i * CHUNK, i < outs ? load_bytes(at + i * row + from, depth - from) : __m512i{});
}

struct Bf16 {
  typedef float Sum;
};
struct Int8 {
  typedef int32_t Sum;
};
#define KC_DP(KIND, c, a, b)                                              \
  do {                                                                    \
    if constexpr (std::is_same<KIND, Bf16>::value) _tile_dpbf16ps(c, a, b); \
    else _tile_dpbssd(c, a, b);                                           \
  } while (0)

// Tiles 0 to 3 as [2][B][16 outputs][16 rows].
template <int B> inline void store_sums(char* sums) {
  _tile_stored(0, sums, CHUNK);
  _tile_stored(2, sums + B * TILE, CHUNK);
  if (B == 2) {
    _tile_stored(1, sums + TILE, CHUNK);
    _tile_stored(3, sums + 3 * TILE, CHUNK);
  }
}
// 32 outputs by one or two blocks of rows, into sums [2][B][16 outputs][16 rows]; asks memory for `ahead`, a panel's weights.
template <class Kind, int B>
inline void panel_sums(const Weights& w, const char* x0, const char* x1, int64_t chunks, const char* ahead, char* sums) {
  _tile_zero(0);
  _tile_zero(2);
  if (B == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int64_t c = 0; c < chunks; c++) {
    const bool whole = c < w.whole;
    const char* a = whole ? w.at + c * CHUNK : w.tail;
    const int64_t row = whole ? w.row : CHUNK;
    _tile_loadd(6, x0 + c * TILE, CHUNK);
    if (B == 2) {
      _tile_loadd(7, x1 + c * TILE, CHUNK);
    }
    _tile_loadd(4, a, row);
    KC_DP(Kind, 0, 4, 6);
    if (B == 2) KC_DP(Kind, 1, 4, 7);
    _tile_loadd(5, a + T * row, row);
    KC_DP(Kind, 2, 5, 6);
    if (B == 2) KC_DP(Kind, 3, 5, 7);
    if (ahead)
      for (int i = 0; i < PANEL; i++, ahead += CHUNK) __builtin_prefetch(ahead, 0, 2);
  }
  store_sums<B>(sums);
}

// Takes the sums of a panel and one or two blocks of rows from m on: put(row, output of the panel, 16 results beside it).
template <class Put> inline void take_sums(const char* sums, int many, int64_t m, int64_t rows, Put&& put) {
  for (int half = 0; half < 2; half++)
    for (int i = 0; i < many; i++, sums += TILE) {
      vf t[W];
#pragma GCC unroll 16
      for (int r = 0; r < T; r++) t[r] = load((const float*)sums + r * T);
      transpose(t);
      for (int r = 0; r < T && m + i * T + r < rows; r++) put(m + i * T + r, half * T, t[r]);
    }
}

// All rows pass by some panels; put(row, output from the first panel's, 16 results) takes them, outputs beside each other.
template <class Kind, class Put>
inline void panels(const Rows& x, const Weights* w, int count, const char* ahead, Put&& put) {
  alignas(64) char sums[4 * TILE];
  const int64_t blocks = (x.rows + T - 1) / T;
  for (int64_t b = 0; b < blocks; b += 2, ahead = nullptr) {
    const int many = b + 1 < blocks ? 2 : 1;
    for (int p = 0; p < count; p++) {
      if (many == 2) panel_sums<Kind, 2>(w[p], x.block(b), x.block(b + 1), x.chunks, ahead, sums);
      else panel_sums<Kind, 1>(w[p], x.block(b), nullptr, x.chunks, ahead, sums);
      take_sums(sums, many, b * T, x.rows, [&](int64_t m, int64_t n, vf found) { put(m, p * PANEL + n, found); });
    }
  }
}
// The other way round: weights as right operands, 16 outputs a tile, one behind the other; rows of x as they lie, a_row bytes
// apart, are left operands. Two blocks of rows from a0 and a1 (A = 1: one) by two tiles' outputs, as [A][2][16 rows][16 outputs].
template <class Kind, int A>
inline void left_sums(const char* a0, const char* a1, int64_t a_row, const char* b0, const char* b1, int64_t chunks, char* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (A == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t c = 0; c < chunks; c++) {
    _tile_loadd(6, b0 + c * TILE, CHUNK);
    _tile_loadd(4, a0 + c * CHUNK, a_row);
    KC_DP(Kind, 0, 4, 6);
    _tile_loadd(7, b1 + c * TILE, CHUNK);
    KC_DP(Kind, 1, 4, 7);
    if (A == 2) {
      _tile_loadd(5, a1 + c * CHUNK, a_row);
      KC_DP(Kind, 2, 5, 6);
      KC_DP(Kind, 3, 5, 7);
    }
  }
  _tile_stored(0, sums, CHUNK);
  _tile_stored(1, sums + TILE, CHUNK);
  if (A == 2) {
    _tile_stored(2, sums + 2 * TILE, CHUNK);
    _tile_stored(3, sums + 3 * TILE, CHUNK);
  }
}

// How many panels rows pass by at once: of few rows, which stay close themselves, one.
inline int panels_at_once(const Rows& x) {
  constexpr int64_t CLOSE = 512 << 10;
  return x.rows <= 2 * T ? 1 : (int)std::max<int64_t>(1, std::min<int64_t>(MOST_PANELS, CLOSE / (PANEL * CHUNK * x.chunks + 1)));
}
}  // namespace amx
#endif
