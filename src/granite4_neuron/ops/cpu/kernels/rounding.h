// Stochastic rounding of float32 to a 16-bit dtype; the definition is ops/stochastic_rounding.py, and results are the
// same bit by bit.
#pragma once

#include "common.h"

namespace granite4_neuron {

// Where random numbers come from: Philox-4x32 (Salmon et al. 2011) with `seed` as its key, `rounds` of it.
struct Rounding {
  uint64_t seed;
  uint32_t stream;
  int64_t rounds;
};

// The dtypes that states are rounded to: bits that are dropped from float32's, and the exponent below which the spacing
// of values stays the same.
template <typename T>
constexpr bool IS_REDUCED = !std::is_same_v<T, float>;
template <typename T>
constexpr int DROPPED_BITS = std::is_same_v<T, at::Half> ? 13 : 16;
template <typename T>
constexpr float SMALLEST_NORMAL = std::is_same_v<T, at::Half> ? 0x1p-14f : 0x1p-126f;

// Rows of values, each at one step of its sequence, to be rounded one after the other. A run of 128 values of a row
// takes 16 counters, and each gives eight times 16 bits: value i of the run has number i / 16 of counter i % 16.
class RowRounding {
 public:
  // position: of the token whose state it is.
  RowRounding(const Rounding& rounding, int64_t position, int64_t columns)
      : rounding_(rounding), position_(static_cast<uint32_t>(position)), runs_((columns + RUN - 1) / RUN) {}

  // row: of all rows of the sequence's state in this layer, [heads * head_dim, d_state].
  void start_row(int64_t row) {
    first_counter_ = row * runs_ * COUNTERS;
  }

  // The values at column n and following. n never goes back within a row.
  template <typename T>
  void store(T* to, int64_t n, Vec first, Vec second) {
    make(n);
#if defined(CPU_CAPABILITY_AVX512)
    static_assert(PAIR == 2 * COUNTERS);
    __m512i bits = _mm512_load_si512(words_[n % RUN / PAIR]);
    __m512i low = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff)), high = _mm512_srli_epi32(bits, 16);
    __m512i rounded = _mm512_inserti64x4(
        _mm512_castsi256_si512(truncated<T>(dithered<T>(first, low))), truncated<T>(dithered<T>(second, high)), 1);
    _mm512_storeu_si512(to + n, rounded);
#else
    float values[PAIR];
    first.store(values);
    second.store(values + LANES);
    for (int64_t i = 0; i < PAIR; i++) store_one(to, n + i, values[i]);
#endif
  }

  template <typename T>
  void store_one(T* to, int64_t n, float value) {
    make(n);
    uint32_t bits = words_[n % RUN / (2 * COUNTERS)][n % COUNTERS] >> (n % (2 * COUNTERS) / COUNTERS * 16) & 0xffff;
    to[n] = round_one<T>(value, bits);
  }

 private:
  static constexpr int64_t COUNTERS = 16, RUN = 8 * COUNTERS;

  Rounding rounding_;
  uint32_t position_;
  int64_t runs_, first_counter_ = 0, made_ = -1;
  alignas(64) uint32_t words_[4][COUNTERS];

  void make(int64_t n) {
    int64_t counter = first_counter_ + n / RUN * COUNTERS;
    if (counter == made_) return;
    made_ = counter;
    alignas(64) uint32_t a[COUNTERS], b[COUNTERS], c[COUNTERS], d[COUNTERS];
    for (int64_t i = 0; i < COUNTERS; i++) {
      a[i] = static_cast<uint32_t>(counter + i);
      b[i] = position_;
      c[i] = rounding_.stream;
      d[i] = 0;
    }
    uint32_t key_a = static_cast<uint32_t>(rounding_.seed), key_b = static_cast<uint32_t>(rounding_.seed >> 32);
    for (int64_t round = 0; round < rounding_.rounds; round++) {
      for (int64_t i = 0; i < COUNTERS; i++) {
        uint64_t of_a = uint64_t{0xD2511F53} * a[i], of_c = uint64_t{0xCD9E8D57} * c[i];
        a[i] = static_cast<uint32_t>(of_c >> 32) ^ b[i] ^ key_a;
        b[i] = static_cast<uint32_t>(of_c);
        c[i] = static_cast<uint32_t>(of_a >> 32) ^ d[i] ^ key_b;
        d[i] = static_cast<uint32_t>(of_a);
      }
      key_a += 0x9E3779B9;
      key_b += 0xBB67AE85;
    }
    for (int64_t i = 0; i < COUNTERS; i++) {
      words_[0][i] = a[i];
      words_[1][i] = b[i];
      words_[2][i] = c[i];
      words_[3][i] = d[i];
    }
  }

  template <typename T>
  static T round_one(float value, uint32_t bits) {
    if (!std::isfinite(value)) return static_cast<T>(value);
    float binade = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0x7f800000);
    float spacing = std::max(binade, SMALLEST_NORMAL<T>) * std::ldexp(1.0f, DROPPED_BITS<T> - 23);
    float random = static_cast<float>(bits >> (16 - DROPPED_BITS<T>)) * std::ldexp(1.0f, -DROPPED_BITS<T>);
    float rounded = std::floor(std::abs(value) / spacing + random) * spacing;
    if constexpr (std::is_same_v<T, at::Half>) rounded = std::min(rounded, 65504.0f);
    return static_cast<T>(std::copysign(rounded, value));
  }

#if defined(CPU_CAPABILITY_AVX512)
  // What `truncated` makes one of the two neighbours of: random parts of the spacing of T's values are added, away from
  // zero. No sum is inexact but those whose truncation does not depend on it.
  template <typename T>
  static __m512 dithered(__m512 value, __m512i bits) {
    __m512 random = _mm512_cvtepi32_ps(_mm512_srli_epi32(bits, 16 - DROPPED_BITS<T>));
    __m512 binade = _mm512_and_ps(value, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000)));
    binade = _mm512_min_ps(_mm512_max_ps(binade, _mm512_set1_ps(SMALLEST_NORMAL<T>)), _mm512_set1_ps(0x1p127f));
    __m512 dither = _mm512_mul_ps(random, _mm512_mul_ps(binade, _mm512_set1_ps(0x1p-23f)));
    __m512 sign = _mm512_and_ps(value, _mm512_set1_ps(-0.0f));
    return _mm512_add_ps(value, _mm512_or_ps(dither, sign));
  }

  // Towards zero.
  template <typename T>
  static __m256i truncated(__m512 value) {
    if constexpr (std::is_same_v<T, at::Half>) {
      return _mm512_cvtps_ph(value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    } else {
      return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(value), 16));
    }
  }
#endif
};

}  // namespace granite4_neuron
