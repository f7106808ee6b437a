// Attention over a cache whose whole blocks are packed in 8 or 4 bits. See parts.h and unpack.h.
#include "run.h"

extern "C" int kimicore_quantized_attention(const Call* c, int type) { return run_type<true>(*c, type); }
