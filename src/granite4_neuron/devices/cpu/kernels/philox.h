// Philox-4x32: random words as a function of a counter and a key (Salmon et al. 2011, "Parallel random numbers: as easy
// as 1, 2, 3", section 3). As `philox_4x32` of ops/stochastic_rounding.py.
#pragma once

#include <array>
#include <cstdint>

#include "common.h"

namespace granite4_neuron {

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

#if defined(CPU_CAPABILITY_AVX512)
  // Replaces counters (a, b, c, d) by their words. There is one in each 64-bit lane of RUNS vectors, whose products
  // overlap; the upper halves hold arbitrary bits.
  template <int RUNS>
  [[gnu::always_inline]] void run(
      __m512i (&a)[RUNS], __m512i (&b)[RUNS], __m512i (&c)[RUNS], __m512i (&d)[RUNS]) const {
    const __m512i multiplier_a = _mm512_set1_epi64(MULTIPLIER_A), multiplier_c = _mm512_set1_epi64(MULTIPLIER_C);
    constexpr int XOR = 0x96;
    for (int64_t round = 0; round < rounds_; round++) {
      __m512i low = _mm512_set1_epi32(keys_[round][0]), high = _mm512_set1_epi32(keys_[round][1]);
      for_each<RUNS>([&](auto run) {
        __m512i product_a = _mm512_mul_epu32(a[run], multiplier_a), product_c = _mm512_mul_epu32(c[run], multiplier_c);
        a[run] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(product_c, 32), b[run], low, XOR);
        c[run] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(product_a, 32), d[run], high, XOR);
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
