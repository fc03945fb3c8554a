// Philox-4x32: random words as a function of a counter and a key (Salmon et al. 2011, "Parallel random numbers: as easy
// as 1, 2, 3", section 3). As `philox_4x32` of ops/stochastic_rounding.py.
#pragma once

#include <array>
#include <cstdint>

#include "common.h"

namespace granite4_neuron {

#if defined(CPU_CAPABILITY_AVX512)
using Lanes64 = __m512i;
inline Lanes64 all_64(int64_t value) { return _mm512_set1_epi64(value); }
inline Lanes64 all_32(uint32_t value) { return _mm512_set1_epi32(static_cast<int32_t>(value)); }
inline Lanes64 product(Lanes64 a, Lanes64 b) { return _mm512_mul_epu32(a, b); }
inline Lanes64 upper_half(Lanes64 a) { return _mm512_srli_epi64(a, 32); }
inline Lanes64 xor_of(Lanes64 a, Lanes64 b, Lanes64 c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
#elif defined(CPU_CAPABILITY_AVX2)
using Lanes64 = __m256i;
inline Lanes64 all_64(int64_t value) { return _mm256_set1_epi64x(value); }
inline Lanes64 all_32(uint32_t value) { return _mm256_set1_epi32(static_cast<int32_t>(value)); }
inline Lanes64 product(Lanes64 a, Lanes64 b) { return _mm256_mul_epu32(a, b); }
inline Lanes64 upper_half(Lanes64 a) { return _mm256_srli_epi64(a, 32); }
inline Lanes64 xor_of(Lanes64 a, Lanes64 b, Lanes64 c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
#endif

class Philox {
 public:
  static constexpr int64_t MAX_ROUNDS = 10;

  Philox(uint64_t key, int64_t rounds) : rounds_(rounds) {
    uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
    for (auto& [first, second] : keys_) {
      first = low;
      second = high;
      low += 0x9E3779B9;
      high += 0xBB67AE85;
    }
  }

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  // Replaces counters (a, b, c, d) by their words. There is one in each 64-bit lane of RUNS vectors, whose products
  // overlap; the upper halves hold arbitrary bits.
  template <int RUNS>
  [[gnu::always_inline]] void run(
      Lanes64 (&a)[RUNS], Lanes64 (&b)[RUNS], Lanes64 (&c)[RUNS], Lanes64 (&d)[RUNS]) const {
    const Lanes64 multiplier_a = all_64(MULTIPLIER_A), multiplier_c = all_64(MULTIPLIER_C);
    for (int64_t round = 0; round < rounds_; round++) {
      Lanes64 low = all_32(keys_[round][0]), high = all_32(keys_[round][1]);
      for_each<RUNS>([&](auto run) {
        Lanes64 product_a = product(a[run], multiplier_a), product_c = product(c[run], multiplier_c);
        a[run] = xor_of(upper_half(product_c), b[run], low);
        c[run] = xor_of(upper_half(product_a), d[run], high);
        b[run] = product_c;
        d[run] = product_a;
      });
    }
  }
#endif

  std::array<uint32_t, 4> words(uint32_t a, uint32_t b, uint32_t c, uint32_t d) const {
    for (int64_t round = 0; round < rounds_; round++) {
      uint64_t product_a = uint64_t{MULTIPLIER_A} * a, product_c = uint64_t{MULTIPLIER_C} * c;
      auto [low, high] = keys_[round];
      a = static_cast<uint32_t>(product_c >> 32) ^ b ^ low;
      c = static_cast<uint32_t>(product_a >> 32) ^ d ^ high;
      b = static_cast<uint32_t>(product_c);
      d = static_cast<uint32_t>(product_a);
    }
    return {a, b, c, d};
  }

 private:
  static constexpr uint32_t MULTIPLIER_A = 0xD2511F53, MULTIPLIER_C = 0xCD9E8D57;

  int64_t rounds_;
  std::array<std::array<uint32_t, 2>, MAX_ROUNDS> keys_;
};

}  // namespace granite4_neuron
