// Gumbel noise for sampling, equal to reference.py bit for bit: see there for the method and its sources.
//
// Every floating-point operation has to round on its own, so this file must be compiled without -ffast-math and
// without contraction to fused multiply-adds; the attributes below say so for either compiler.

#include <cstdint>
#include <cstring>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace {

constexpr int kBlocks = 64;            // Philox blocks per pass: 256 tokens
constexpr int kTokens = 4 * kBlocks;

inline void philox(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
        const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
        const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        const uint32_t n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c0 = n0;
        c1 = uint32_t(p1);
        c2 = n2;
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

inline double log_of(double x) {
    int64_t bits;
    std::memcpy(&bits, &x, 8);
    const int64_t exponent = (bits - INT64_C(0x3FE6A09E667F3BCD)) >> 52;
    bits -= exponent * (INT64_C(1) << 52);
    double m;
    std::memcpy(&m, &bits, 8);
    const double f = m - 1.0;
    const double s = f / (f + 2.0);
    const double z = s * s;
    double series = 2.0 / 21.0;
    for (int k = 9; k >= 0; --k) series = series * z + 2.0 / (2 * k + 1);
    return double(exponent) * 0.6931471805599453 + s * series;
}

inline float gumbel_of(uint32_t word) {
    const double uniform = (double(word) + 0.5) * 0x1p-32;
    return float(-log_of(-log_of(uniform)));
}

// At least the noise of the word: -log(1 - u) from above, with log2 replaced by the line through powers of two.
inline float bound_of(uint32_t word) {
    const float rest = float(~word) + 0.5f;
    int32_t bits;
    std::memcpy(&bits, &rest, 4);
    return (159.0f - float(bits) * 0x1p-23f) * 0.69314718f + 1e-3f;
}

}  // namespace

extern "C" {

// out[i] = noise of ids[i].
void kimicore_gumbel(uint64_t seed, uint32_t choice, uint32_t position, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) {
        uint32_t c[4] = {uint32_t(ids[i] >> 2), position, choice, 0};
        philox(c[0], c[1], c[2], c[3], uint32_t(seed), uint32_t(seed >> 32));
        out[i] = gumbel_of(c[ids[i] & 3]);
    }
}

// The id with the largest scores[id] + noise, the lowest of equals; -1 where no score is above -inf.
int64_t kimicore_gumbel_argmax(const float* scores, int64_t size, uint64_t seed, uint32_t choice, uint32_t position) {
    const uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    float reached = -__builtin_inff();
    int64_t winner = -1;
    uint32_t words[kTokens];
    for (int64_t start = 0; start < size; start += kTokens) {
        const uint32_t base = uint32_t(start >> 2);
        for (int i = 0; i < kBlocks; ++i) {
            uint32_t c0 = base + uint32_t(i), c1 = position, c2 = choice, c3 = 0;
            philox(c0, c1, c2, c3, k0, k1);
            words[4 * i] = c0;
            words[4 * i + 1] = c1;
            words[4 * i + 2] = c2;
            words[4 * i + 3] = c3;
        }
        const int64_t left = size - start < kTokens ? size - start : kTokens;
        for (int64_t group = 0; group < left; group += 16) {
            const int64_t end = group + 16 < left ? group + 16 : left;
            int any = 0;
            if (end == group + 16) {
                for (int i = 0; i < 16; ++i) any |= scores[start + group + i] + bound_of(words[group + i]) >= reached;
            } else {
                any = 1;
            }
            if (!any) continue;
            for (int64_t i = group; i < end; ++i) {
                const float score = scores[start + i];
                if (!(score + bound_of(words[i]) >= reached)) continue;
                const float noisy = score + gumbel_of(words[i]);
                if (noisy > reached) {
                    reached = noisy;
                    winner = start + i;
                }
            }
        }
    }
    return winner;
}

}  // extern "C"
