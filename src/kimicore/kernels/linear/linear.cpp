// Product with weights whose every result is one sum in one order, whatever the number of rows: lanes of the inner dimension
// in one chain, then the lanes in a tree. Row 3 of 7 has the same bits as row 3 of 512.
#include "../simd.h"
#if defined(KC_AVX512)
#include "avx512.h"
#include "amx_linear.h"
#else
#include "packed.h"
#endif

#if defined(KC_AMX)
constexpr int64_t TILED_ROWS = INT64_MAX;
#endif
// Up to how many rows a type (0 float32, 1 bfloat16, 2 float16) is multiplied faster than by torch: 0 where it is not served.
extern "C" int64_t kimicore_linear_rows(int type) {
  constexpr int64_t all = INT64_MAX;
#if defined(KC_AMX)
  if (type == 1 && amx::allowed()) return TILED_ROWS;
#endif
#if defined(KC_BF16_DOT)
  if (type == 1) return 128;
#elif defined(KC_AVX2)
  return all;  // torch has no fast 16-bit product there
#endif
  return type == 0 ? all : 0;
}
// Returns 0, or 1 where there is no memory.
extern "C" int kimicore_linear(const Call* c, int type, int threads, parallel_entry entry) {
#if defined(KC_AMX)
  static const bool tiles = amx::allowed();
  if (type == 1 && tiles) return !run_tiles(*c, threads, entry);
#endif
#if defined(KC_BF16_DOT)
  if (type == 1) return run_half(*c, threads, entry), 0;
#endif
#if defined(KC_AVX512)
  (void)type;
  return run<Wide>(*c, threads, entry), 0;
#else
  if (type == 1) return !run<bf16>(*c, threads, entry);
  if (type == 2) return !run<f16>(*c, threads, entry);
  return !run<float>(*c, threads, entry);
#endif
}
