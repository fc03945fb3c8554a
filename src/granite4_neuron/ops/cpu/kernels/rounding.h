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

// What float32 has more than a 16-bit dtype: bits of the mantissa. Below SMALLEST_NORMAL the dtype's values are as far
// apart as above it.
template <typename T>
constexpr bool IS_REDUCED = !std::is_same_v<T, float>;
template <typename T>
constexpr int DROPPED_BITS = std::is_same_v<T, at::Half> ? 13 : 16;
template <typename T>
constexpr float SMALLEST_NORMAL = std::is_same_v<T, at::Half> ? 0x1p-14f : 0x1p-126f;

// Rows of a head's state, [head_dim, d_state], that share their random numbers: each has those of the one before plus a
// quarter of their range.
constexpr int64_t SHARED_ROWS = 4;

// Rounds one state at one step of its sequence, SHARED_ROWS of a head after the other.
//
// 64 values of a row take 8 counters, of which each gives 4 words of 32 bits: 16 for each value. Words a and b of the
// counters, in turns, are for values 0 to 31, words c and d for the others; of 16 words first the low halves are used,
// then the high ones.
class StateRounding {
 public:
  // position: of the token whose state it is.
  StateRounding(const Rounding& rounding, int64_t position, int64_t head_dim, int64_t d_state)
      : position_(static_cast<uint32_t>(position)), stream_(rounding.stream), rounds_(rounding.rounds),
        head_groups_((head_dim + SHARED_ROWS - 1) / SHARED_ROWS),
        group_counters_((d_state + RUN - 1) / RUN * COUNTERS) {
    uint32_t low = static_cast<uint32_t>(rounding.seed), high = static_cast<uint32_t>(rounding.seed >> 32);
    for (auto& [first, second] : keys_) {
      first = low;
      second = high;
      low += 0x9E3779B9;
      high += 0xBB67AE85;
    }
  }

  // Those of element (p, 0) of the head, and the others that share their random numbers.
  void start_rows(int64_t head, int64_t p) {
    first_counter_ = (head * head_groups_ + p / SHARED_ROWS) * group_counters_;
  }

  // Element (row, n) of those.
  template <typename T>
  void store_one(T* to, int64_t row, int64_t n, float value) {
    make_words(n);
    uint32_t word = words_[n % (2 * RUN) / 32][n % 16], half = n % 32 < 16 ? word : word >> 16;
    *to = round_one<T>(value, (half + row * QUARTER) & 0xffff);
  }

  // Elements (row, n) and following; n is a multiple of PAIR.
  template <typename T>
  void store(T* to, int64_t row, int64_t n, Vec first, Vec second) {
#if defined(CPU_CAPABILITY_AVX512)
    make_words(n);
    __m512i words = _mm512_load_si512(words_[n % (2 * RUN) / 32]);
    words = _mm512_add_epi16(words, _mm512_set1_epi16(static_cast<int16_t>(row * QUARTER)));
    constexpr int UNUSED = 16 - DROPPED_BITS<T>;
    __m512i low = _mm512_srli_epi32(_mm512_slli_epi32(words, 16), 16 + UNUSED);
    __m256i a = round_vector<T>(first, low), b = round_vector<T>(second, _mm512_srli_epi32(words, 16 + UNUSED));
    _mm512_storeu_si512(to, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
#else
    float values[PAIR];
    first.store(values);
    second.store(values + LANES);
    for (int64_t i = 0; i < PAIR; i++) store_one(to + i, row, n + i, values[i]);
#endif
  }

  static constexpr int64_t MAX_ROUNDS = 10;

 private:
  static constexpr int64_t COUNTERS = 8, RUN = 8 * COUNTERS;
  static constexpr uint32_t MULTIPLIER_A = 0xD2511F53, MULTIPLIER_C = 0xCD9E8D57, QUARTER = 0x10000 / SHARED_ROWS;

  uint32_t position_, stream_;
  int64_t rounds_, head_groups_, group_counters_, first_counter_ = 0, made_ = -1;
  std::array<std::array<uint32_t, 2>, MAX_ROUNDS> keys_;
  alignas(64) uint32_t words_[4][16];

  // Those of the run that column n is in, and of the next one: their chains of products overlap.
  void make_words(int64_t n) {
    int64_t counter = first_counter_ + n / (2 * RUN) * (2 * COUNTERS);
    if (counter == made_) return;
    made_ = counter;
#if defined(CPU_CAPABILITY_AVX512)
    // A counter in each lane of 64 bits, whose upper halves hold whatever is left there.
    __m512i a[2], b[2], c[2], d[2];
    for (int run = 0; run < 2; run++) {
      a[run] = _mm512_add_epi64(_mm512_set1_epi64(counter + run * COUNTERS), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
      b[run] = _mm512_set1_epi32(position_);
      c[run] = _mm512_set1_epi32(stream_);
      d[run] = _mm512_setzero_si512();
    }
    const __m512i multiplier_a = _mm512_set1_epi64(MULTIPLIER_A), multiplier_c = _mm512_set1_epi64(MULTIPLIER_C);
    constexpr int XOR = 0x96;
    for (int64_t round = 0; round < rounds_; round++) {
      __m512i low = _mm512_set1_epi32(keys_[round][0]), high = _mm512_set1_epi32(keys_[round][1]);
#pragma GCC unroll 2
      for (int run = 0; run < 2; run++) {
        __m512i of_a = _mm512_mul_epu32(a[run], multiplier_a), of_c = _mm512_mul_epu32(c[run], multiplier_c);
        a[run] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(of_c, 32), b[run], low, XOR);
        c[run] = _mm512_ternarylogic_epi32(_mm512_srli_epi64(of_a, 32), d[run], high, XOR);
        b[run] = of_c;
        d[run] = of_a;
      }
    }
    constexpr __mmask16 ODD = 0xaaaa;
#pragma GCC unroll 2
    for (int run = 0; run < 2; run++) {
      _mm512_store_si512(words_[2 * run], _mm512_mask_shuffle_epi32(a[run], ODD, b[run], _MM_PERM_CCAA));
      _mm512_store_si512(words_[2 * run + 1], _mm512_mask_shuffle_epi32(c[run], ODD, d[run], _MM_PERM_CCAA));
    }
#else
    for (int64_t i = 0; i < 2 * COUNTERS; i++) {
      uint32_t a = static_cast<uint32_t>(counter + i), b = position_, c = stream_, d = 0;
      for (int64_t round = 0; round < rounds_; round++) {
        uint64_t of_a = uint64_t{MULTIPLIER_A} * a, of_c = uint64_t{MULTIPLIER_C} * c;
        auto [low, high] = keys_[round];
        a = static_cast<uint32_t>(of_c >> 32) ^ b ^ low;
        c = static_cast<uint32_t>(of_a >> 32) ^ d ^ high;
        b = static_cast<uint32_t>(of_c);
        d = static_cast<uint32_t>(of_a);
      }
      uint32_t *even = words_[i / COUNTERS * 2] + i % COUNTERS * 2, *odd = even + 16;
      even[0] = a;
      even[1] = b;
      odd[0] = c;
      odd[1] = d;
    }
#endif
  }

  // bits: 16 random ones, of which the first DROPPED_BITS are used.
  template <typename T>
  static T round_one(float value, uint32_t bits) {
    if (!std::isfinite(value)) return static_cast<T>(value);
    float binade = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0x7f800000);
    float spacing = std::max(binade, SMALLEST_NORMAL<T>) * std::ldexp(1.0f, DROPPED_BITS<T> - 23);
    int32_t parts = static_cast<int32_t>(std::nearbyint(std::abs(value) / spacing * std::ldexp(1.0f, DROPPED_BITS<T>)));
    int32_t units = (parts + static_cast<int32_t>(bits >> (16 - DROPPED_BITS<T>))) >> DROPPED_BITS<T>;
    float rounded = static_cast<float>(units) * spacing;
    if constexpr (std::is_same_v<T, at::Half>) rounded = std::min(rounded, 65504.0f);
    return static_cast<T>(std::copysign(rounded, value));
  }

#if defined(CPU_CAPABILITY_AVX512)
  // A random number, of DROPPED_BITS, is added to the bits that are dropped: its carry is what rounds up. What is not
  // finite stays that.
  template <typename T>
  static __m256i round_vector(__m512 value, __m512i random) {
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      __m512i sum = _mm512_add_epi32(_mm512_castps_si512(value), random);
      return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, DROPPED_BITS<T>));
    } else {
      // Of a number below its smallest normal one float16 drops more bits, but as many of that number's sum with it.
      const __m512 smallest = _mm512_set1_ps(SMALLEST_NORMAL<T>), sign = _mm512_set1_ps(-0.0f);
      __mmask16 is_small = _mm512_cmp_ps_mask(_mm512_andnot_ps(sign, value), smallest, _CMP_LT_OQ);
      __m512 offset = _mm512_or_ps(_mm512_and_ps(value, sign), smallest);
      value = _mm512_mask_add_ps(value, is_small, value, offset);
      value = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(value), random));
      value = _mm512_mask_sub_ps(value, is_small, value, offset);
      return _mm512_cvtps_ph(value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    }
  }
#endif
};

}  // namespace granite4_neuron
