// Attention over a paged key-value cache. See parts.h.
#include "run.h"

extern "C" int kimicore_paged_attention(const Call* c, int type) { return run_type<false>(*c, type); }
