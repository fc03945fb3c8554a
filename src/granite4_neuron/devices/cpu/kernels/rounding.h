// Stochastic rounding of float32 to a 16-bit dtype; the definition is ops/stochastic_rounding.py, and results are the
// same bit by bit.
#pragma once

#include "philox.h"

namespace granite4_neuron {

// The source of random numbers: Philox-4x32 (Salmon et al. 2011) with `seed` as its key, `rounds` of it.
struct Rounding {
  uint64_t seed;
  uint32_t stream;
  int64_t rounds;
};

// Bits of the mantissa that float32 has beyond a 16-bit dtype.
template <typename T>
constexpr bool IS_REDUCED = !std::is_same_v<T, float>;
template <typename T>
constexpr int DROPPED_BITS = std::is_same_v<T, at::Half> ? 13 : 16;

// Rows of a head's state, [head_dim, d_state], that share their random numbers: each row has the previous row's numbers
// plus a quarter of their range.
constexpr int64_t SHARED_ROWS = 4;

// Columns of these rows share words of 32 random bits, half a word each.
constexpr int64_t WORDS = 16, WORD_COLUMNS = 2 * WORDS;

// The random numbers of states: 16 bits for each value, in words of 32.
//
// 64 values of a row take 8 counters, each of which gives 4 words. Words a and b of the counters, alternating, are for
// values 0 to 31, words c and d for the others. So every 32 columns have 16 words; their low halves are used first,
// then the high ones.
class StateRounding {
 public:
  StateRounding(const Rounding& rounding, int64_t head_dim, int64_t d_state)
      : philox_(rounding.seed, rounding.rounds), stream_(rounding.stream),
        head_groups_((head_dim + SHARED_ROWS - 1) / SHARED_ROWS), runs_((d_state + RUN - 1) / RUN) {}

  // The number of words for SHARED_ROWS rows, rounded up: `fill` writes two runs at a time, whose products overlap.
  int64_t num_words() const {
    return (runs_ + 1) / 2 * 2 * RUN / 2;
  }

  // Writes the words of rows p and following of a head's state after the token at a position; p is a multiple of
  // SHARED_ROWS.
  void fill(int64_t position, int64_t head, int64_t p, uint32_t* words) const {
    int64_t counter = (head * head_groups_ + p / SHARED_ROWS) * runs_ * COUNTERS;
    for (int64_t run = 0; run < runs_; run += 2, counter += 2 * COUNTERS, words += RUN)
      fill_runs(static_cast<uint32_t>(position), counter, words);
  }

 private:
  static constexpr int64_t COUNTERS = 8, RUN = 8 * COUNTERS;

  Philox philox_;
  uint32_t stream_;
  int64_t head_groups_, runs_;

  void fill_runs(uint32_t position, int64_t counter, uint32_t* words) const {
#if defined(CPU_CAPABILITY_AVX512)
    __m512i a[2], b[2], c[2], d[2];
    for (int run = 0; run < 2; run++) {
      a[run] = _mm512_add_epi64(_mm512_set1_epi64(counter + run * COUNTERS), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
      b[run] = _mm512_set1_epi32(position);
      c[run] = _mm512_set1_epi32(stream_);
      d[run] = _mm512_setzero_si512();
    }
    philox_.run(a, b, c, d);
    constexpr __mmask16 ODD = 0xaaaa;
#pragma GCC unroll 2
    for (int run = 0; run < 2; run++) {
      uint32_t* to = words + run * RUN / 2;
      _mm512_storeu_si512(to, _mm512_mask_shuffle_epi32(a[run], ODD, b[run], _MM_PERM_CCAA));
      _mm512_storeu_si512(to + 16, _mm512_mask_shuffle_epi32(c[run], ODD, d[run], _MM_PERM_CCAA));
    }
#else
    for (int64_t i = 0; i < 2 * COUNTERS; i++) {
      auto [a, b, c, d] = philox_.words(static_cast<uint32_t>(counter + i), position, stream_, 0);
      uint32_t *even = words + i / COUNTERS * RUN / 2 + i % COUNTERS * 2, *odd = even + 16;
      even[0] = a;
      even[1] = b;
      odd[0] = c;
      odd[1] = d;
    }
#endif
  }
};

// A `Vec`'s bits as integers.
using Bits = uint32_t __attribute__((vector_size(sizeof(Vec))));

// The random bits of LANES values of row `row` of SHARED_ROWS, from column `column` of the WORD_COLUMNS of these words.
inline Bits random_bits(const uint32_t* words, int64_t row, int64_t column) {
  constexpr uint32_t QUARTER = 0x10000 / SHARED_ROWS;
  Bits pair;
  std::memcpy(&pair, words + column % WORDS, sizeof(pair));
  return ((pair >> (column / WORDS * 16)) + static_cast<uint32_t>(row) * QUARTER) & 0xffff;
}

// Values rounded to numbers of a 16-bit dtype T. A random number is added to the bits that are dropped, and its carry
// rounds up. Infinities and NaN are kept.
template <typename T>
inline Vec round_to(Vec values, Bits random) {
  constexpr uint32_t KEPT = ~uint32_t{0} << DROPPED_BITS<T>;
  Bits bits = std::bit_cast<Bits>(values);
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    return std::bit_cast<Vec>((bits + random) & KEPT);
  } else {
    using Numbers = int32_t __attribute__((vector_size(sizeof(Vec))));
    using Floats = float __attribute__((vector_size(sizeof(Vec))));
    constexpr int32_t SMALLEST = std::bit_cast<int32_t>(0x1p-14f), LARGEST = std::bit_cast<int32_t>(65504.0f);
    constexpr int32_t INFINITE = 0x7f800000;
    Bits sign = bits & 0x80000000;
    Numbers size = (Numbers)(bits ^ sign);
    size = size > LARGEST && size < INFINITE ? Numbers{} + LARGEST : size;
    // Below its smallest normal number float16 drops more bits; after adding that number it drops as many as usual.
    Floats offset = (Floats)(size < SMALLEST ? Numbers{} + SMALLEST : Numbers{});
    Bits rounded = ((Bits)((Floats)size + offset) + (random >> (16 - DROPPED_BITS<T>))) & KEPT;
    return std::bit_cast<Vec>((Bits)((Floats)rounded - offset) | sign);
  }
}

}  // namespace granite4_neuron
