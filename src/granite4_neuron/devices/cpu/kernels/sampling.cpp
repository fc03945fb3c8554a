#include "sampling.h"

#include "parallel.h"
#include "philox.h"

namespace granite4_neuron {
namespace {

constexpr int64_t BLOCK = 64;      // tokens
constexpr int64_t DRAWN_BLOCK = 128;  // more, so that more of a generator's products overlap
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr int64_t NOT_FINITE = -1, ALL_MASKED = -2, NONE_LEFT = -3;
constexpr int WEIGHT_BITS = 44, SURPRISE_BITS = 18;
constexpr float NO_WEIGHT = -45.0f;     // the weight of this logarithm and of lower ones is 0
constexpr float HIGHEST_NOISE = 33.0f;  // above all -log2 of exponential random numbers

constexpr std::array FOLDED_LOG2 = {0.721348345f, 0.180261046f,   0.061231792f, 0.0164246596f,
                                    0.0245026015f, -0.0152112301f, 0.0114419432f};
constexpr std::array LOG2 = {1.44269478f,  -0.721314311f, 0.480131418f, -0.353800535f,
                             0.257167667f, -0.157048762f, 0.0648411289f, -0.0126716197f};
constexpr std::array EXP2 = {1.0f, -0.693144441f, 0.240186706f, -0.0553166941f, 0.00922837947f, -0.000954034273f};

template <size_t COUNT>
[[gnu::always_inline]] inline float polynomial(float x, const std::array<float, COUNT>& coefficients) {
  float result = coefficients[COUNT - 1];
  for_each<COUNT - 1>([&](auto i) { result = result * x + coefficients[COUNT - 2 - i]; });
  return result;
}

[[gnu::always_inline]] inline float mantissa(uint32_t bits) {
  return std::bit_cast<float>((bits & 0x7fffff) | 0x3f800000);
}

// As `exponentials` of ops/sampling.py, of a word.
[[gnu::always_inline]] inline float exponential(uint32_t word) {
  int32_t is_high = static_cast<int32_t>(word) >> 31;  // all bits or none
  float folded = static_cast<float>(static_cast<int32_t>(word) ^ is_high) + 0.5f;
  uint32_t bits = std::bit_cast<uint32_t>(folded);
  uint32_t y_low = std::bit_cast<uint32_t>(2.0f - mantissa(bits)), y_high = std::bit_cast<uint32_t>(folded * 0x1p-31f);
  float y = std::bit_cast<float>((y_high & is_high) | (y_low & ~is_high));
  int32_t n = (31 - (static_cast<int32_t>(bits >> 23) - 127)) & ~is_high;
  return static_cast<float>(n) + y * polynomial(y, FOLDED_LOG2);
}

[[gnu::always_inline]] inline float log2_of(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  float fraction = mantissa(bits) - 1.0f;
  return static_cast<float>(static_cast<int32_t>(bits >> 23) - 127) + fraction * polynomial(fraction, LOG2);
}

// As `weights` of a block of logarithms. In three loops, so that each has values of one width.
inline void write_weights(const float* logs, int64_t* weights) {
  alignas(64) uint32_t whole[BLOCK], fraction[BLOCK];  // unsigned: AVX2 shifts 64 bits to the right without a sign
  alignas(64) float rest[BLOCK];
  for (int64_t i = 0; i < BLOCK; i++) {
    // Positive numbers are in the order of their bits, which a compiler can compare without branches.
    constexpr int32_t MOST = std::bit_cast<int32_t>(63.0f);
    float exponent = std::bit_cast<float>(std::min(std::bit_cast<int32_t>(-logs[i]), MOST));
    auto rounded = static_cast<int32_t>(exponent);
    whole[i] = static_cast<uint32_t>(rounded);
    rest[i] = exponent - static_cast<float>(rounded);
  }
  for (int64_t i = 0; i < BLOCK; i++) {
    auto rounded = static_cast<int32_t>(polynomial(rest[i], EXP2) * 0x1p30f);
    fraction[i] = static_cast<uint32_t>(rounded);
  }
  for (int64_t i = 0; i < BLOCK; i++)
    weights[i] = static_cast<int64_t>(
        static_cast<uint64_t>(fraction[i]) << (WEIGHT_BITS - 30) >> static_cast<uint64_t>(whole[i]));
}

inline int64_t weight(float log) {
  float logs[BLOCK];
  int64_t weights[BLOCK];
  std::fill(logs, logs + BLOCK, log);
  write_weights(logs, weights);
  return weights[0];
}

// The words of DRAWN_BLOCK tokens from `first` on, which is a multiple of 4.
inline void random_words(const Philox& philox, uint32_t place, int64_t first, uint32_t* words) {
  int64_t counter = first / 4;
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int RUNS = DRAWN_BLOCK / 32;
  __m512i a[RUNS], b[RUNS], c[RUNS], d[RUNS];
  for_each<RUNS>([&](auto run) {
    a[run] = _mm512_add_epi64(_mm512_set1_epi64(counter + run * 8), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    b[run] = _mm512_set1_epi32(place);
    c[run] = d[run] = _mm512_setzero_si512();
  });
  philox.run(a, b, c, d);
  constexpr __mmask16 ODD = 0xaaaa;
  const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  for_each<RUNS>([&](auto run) {
    __m512i first_two = _mm512_mask_shuffle_epi32(a[run], ODD, b[run], _MM_PERM_CCAA);
    __m512i last_two = _mm512_mask_shuffle_epi32(c[run], ODD, d[run], _MM_PERM_CCAA);
    _mm512_storeu_si512(words + run * 32, _mm512_permutex2var_epi64(first_two, low, last_two));
    _mm512_storeu_si512(words + run * 32 + 16, _mm512_permutex2var_epi64(first_two, high, last_two));
  });
#elif defined(CPU_CAPABILITY_AVX2)
  constexpr int RUNS = 2;
  for (int64_t i = 0; i < DRAWN_BLOCK; i += 16 * RUNS) {
    __m256i a[RUNS], b[RUNS], c[RUNS], d[RUNS];
    for_each<RUNS>([&](auto run) {
      a[run] = _mm256_add_epi64(_mm256_set1_epi64x(counter + i / 4 + run * 4), _mm256_setr_epi64x(0, 1, 2, 3));
      b[run] = _mm256_set1_epi32(static_cast<int32_t>(place));
      c[run] = d[run] = _mm256_setzero_si256();
    });
    philox.run(a, b, c, d);
    for_each<RUNS>([&](auto run) {
      __m256i first_two = _mm256_blend_epi32(a[run], _mm256_slli_epi64(b[run], 32), 0xaa);
      __m256i last_two = _mm256_blend_epi32(c[run], _mm256_slli_epi64(d[run], 32), 0xaa);
      __m256i even = _mm256_unpacklo_epi64(first_two, last_two), odd = _mm256_unpackhi_epi64(first_two, last_two);
      auto* to = reinterpret_cast<__m256i*>(words + i + run * 16);
      _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
      _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    });
  }
#else
  for (int64_t i = 0; i < DRAWN_BLOCK / 4; i++) {
    auto four = philox.words(static_cast<uint32_t>(counter + i), place, 0, 0);
    std::copy(four.begin(), four.end(), words + 4 * i);
  }
#endif
}

// The highest value, or NaN if there is one.
inline float highest_of(const float* values, int64_t count) {
  Vec most[4] = {Vec(LOWEST), Vec(LOWEST), Vec(LOWEST), Vec(LOWEST)};
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    for_each<4>([&](auto part) {
      most[part] = at::vec::maximum(most[part], Vec::loadu(values + i + part * LANES));
    });
  float highest = maximum(at::vec::maximum(at::vec::maximum(most[0], most[1]), at::vec::maximum(most[2], most[3])));
  for (; i < count; i++)
    if (!(values[i] <= highest)) highest = std::isnan(highest) ? highest : values[i];
  return highest;
}

// The highest of values of which none is NaN.
template <int64_t COUNT = BLOCK>
inline float highest_of_block(const float* values) {
  // `clamp_min` is one instruction; `maximum` also looks for NaN.
  Vec most[2] = {Vec::loadu(values), Vec::loadu(values + LANES)};
  for (int64_t i = 2 * LANES; i < COUNT; i += 2 * LANES)
    for_each<2>([&](auto part) { most[part] = at::vec::clamp_min(most[part], Vec::loadu(values + i + part * LANES)); });
  return maximum(at::vec::clamp_min(most[0], most[1]));
}

inline int64_t first_equal(const float* values, int64_t count, float value) {
  int64_t i = 0;
  for (; i + BLOCK <= count && highest_of_block(values + i) != value; i += BLOCK) continue;
  while (values[i] != value) i++;
  return i;
}

// Numbers in the order of the scores, and equal for equal scores.
inline uint32_t ordered(float score) {
  uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 equals 0
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000);
}

// Memory of a thread, kept for the next call.
struct RowBuffers {
  std::vector<float> masked, adjusted, logs, highest;
  std::vector<uint32_t> keys;
  std::vector<int32_t> tokens;
  std::vector<int64_t> weights;
  std::array<int64_t, 4 * 2048> histogram;

  static RowBuffers& of_this_thread() {
    thread_local RowBuffers scratch;
    return scratch;
  }
};

// Copies the values of a block whose bit is set, side by side. `to` has room for a block, and may be `from` or before.
template <typename T>
inline void compress(const T* from, uint64_t bits, T* to) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (sizeof(T) == 4) {
    for (int64_t i = 0; i < BLOCK; i += 16, bits >>= 16) {
      auto some = static_cast<__mmask16>(bits);
      _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(some, _mm512_loadu_si512(from + i)));
      to += std::popcount(bits & 0xffff);
    }
  } else {
    for (int64_t i = 0; i < BLOCK; i += 8, bits >>= 8) {
      auto some = static_cast<__mmask8>(bits);
      _mm512_storeu_si512(to, _mm512_maskz_compress_epi64(some, _mm512_loadu_si512(from + i)));
      to += std::popcount(bits & 0xff);
    }
  }
#else
  for (; bits != 0; bits &= bits - 1) *to++ = from[std::countr_zero(bits)];
#endif
}

// A bit for each value of a block that is from `low` to `high`.
inline uint64_t bits_within(const uint32_t* values, uint32_t low, uint32_t high) {
  uint64_t bits = 0;
#if defined(CPU_CAPABILITY_AVX512)
  for (int64_t i = BLOCK - 16; i >= 0; i -= 16) {
    __m512i above = _mm512_sub_epi32(_mm512_loadu_si512(values + i), _mm512_set1_epi32(low));
    bits = bits << 16 | _mm512_cmple_epu32_mask(above, _mm512_set1_epi32(high - low));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i least = _mm256_set1_epi32(static_cast<int32_t>(low));
  const __m256i most = _mm256_set1_epi32(static_cast<int32_t>(high - low));
  for (int64_t i = BLOCK - 8; i >= 0; i -= 8) {
    __m256i above = _mm256_sub_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i)), least);
    __m256i is_within = _mm256_cmpeq_epi32(_mm256_min_epu32(above, most), above);
    bits = bits << 8 | static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(is_within)));
  }
#else
  for (int64_t i = 0; i < BLOCK; i++) bits |= static_cast<uint64_t>(values[i] - low <= high - low) << i;
#endif
  return bits;
}

// A bit for each value of a block that is above `low` and at most `high`.
inline uint64_t bits_between(const float* values, float low, float high) {
  uint64_t bits = 0;
#if defined(CPU_CAPABILITY_AVX512)
  for (int64_t i = BLOCK - 16; i >= 0; i -= 16) {
    __m512 some = _mm512_loadu_ps(values + i);
    __mmask16 is_above = _mm512_cmp_ps_mask(some, _mm512_set1_ps(low), _CMP_GT_OQ);
    bits = bits << 16 | _mm512_mask_cmp_ps_mask(is_above, some, _mm512_set1_ps(high), _CMP_LE_OQ);
  }
#elif defined(CPU_CAPABILITY_AVX2)
  for (int64_t i = BLOCK - 8; i >= 0; i -= 8) {
    __m256 some = _mm256_loadu_ps(values + i);
    __m256 is_above = _mm256_cmp_ps(some, _mm256_set1_ps(low), _CMP_GT_OQ);
    __m256 is_below = _mm256_cmp_ps(some, _mm256_set1_ps(high), _CMP_LE_OQ);
    bits = bits << 8 | static_cast<uint32_t>(_mm256_movemask_ps(_mm256_and_ps(is_above, is_below)));
  }
#else
  for (int64_t i = 0; i < BLOCK; i++) bits |= static_cast<uint64_t>((values[i] > low) & (values[i] <= high)) << i;
#endif
  return bits;
}

// f(block, first) for each block of values, from number `first` on; the last one is padded with -inf.
template <int64_t COUNT = BLOCK, typename F>
inline void for_each_block(const float* values, int64_t count, const F& f) {
  int64_t first = 0;
  for (; first + COUNT <= count; first += COUNT) f(values + first, first);
  if (first == count) return;
  alignas(64) float last[COUNT];
  std::fill(last, last + COUNT, LOWEST);
  std::copy(values + first, values + count, last);
  f(last, first);
}

// Where the tokens that are kept end, in the order of their scores and then of their numbers.
struct Edge {
  uint32_t key;    // of the last one
  int64_t before;  // the mass of those with higher keys
};

// Finds the last key before which the mass, from the highest key down, is less than `limit`. It narrows the keys down
// by their bits, up to 11 at a time, so that nothing is sorted; sums of whole numbers do not depend on an order.
// keys: [count], and room for a block; overwritten. masses: alike; null for a mass of 1 each.
Edge find_edge(uint32_t* keys, int64_t* masses, int64_t count, int64_t limit, RowBuffers& scratch) {
  auto& histogram = scratch.histogram;
  for (int64_t before = 0;;) {
    uint32_t low = UINT32_MAX, high = 0;
    for (int64_t i = 0; i < count; i++) {
      low = std::min(low, keys[i]);
      high = std::max(high, keys[i]);
    }
    if (low == high) return {high, before};
    int width = std::min<int>(std::bit_width(static_cast<uint64_t>(count)), 11);
    uint32_t last = (1u << width) - 1;
    int shift = std::max<int>(std::bit_width(low ^ high) - width, 0);  // they agree in all higher bits
    auto bucket_of = [=](uint32_t key) { return key >> shift & last; };
    std::fill_n(histogram.begin(), 4 * (last + 1), 0);
    // Four sums for each bucket: an addition waits for the one before it to the same place.
    auto add = [&](auto mass_of) {
      int64_t i = 0;
      for (; i + 4 <= count; i += 4)
        for_each<4>([&](auto part) { histogram[4 * bucket_of(keys[i + part]) + part] += mass_of(i + part); });
      for (; i < count; i++) histogram[4 * bucket_of(keys[i])] += mass_of(i);
    };
    masses == nullptr ? add([](int64_t) { return int64_t{1}; }) : add([masses](int64_t i) { return masses[i]; });
    uint32_t edge = bucket_of(high);
    for (;; edge--) {
      const int64_t* sums = &histogram[4 * edge];
      int64_t more = sums[0] + sums[1] + sums[2] + sums[3];
      if (before + more >= limit) break;
      before += more;
    }
    int64_t found = 0;
    uint32_t least = ((high >> shift & ~last) | edge) << shift, most = least | ((1u << shift) - 1);
    for (int64_t first = 0; first < count; first += BLOCK) {
      uint64_t bits = bits_within(keys + first, least, most);
      if (first + BLOCK > count) bits &= (uint64_t{1} << (count - first)) - 1;
      if (bits == 0) continue;
      compress(keys + first, bits, keys + found);
      if (masses != nullptr) compress(masses + first, bits, masses + found);
      found += std::popcount(bits);
    }
    count = found;
  }
}

// Which tokens are kept: those above a score, and those of that score up to a token; and of these the ones whose
// logarithms reach `cutoff` and whose surprise is near to the mean one.
struct Kept {
  float lowest = std::numeric_limits<float>::lowest();
  int32_t last_of_lowest = std::numeric_limits<int32_t>::max();
  float cutoff = LOWEST;
  float mean = 0.0f, farthest = std::numeric_limits<float>::infinity();
};

inline float score_of(uint32_t key) {
  return std::bit_cast<float>(key ^ ((key >> 31) - 1 | 0x80000000));
}

// The highest tokens' edge by count, and so the `number`-th highest score, from 1 on.
inline Edge top_edge(const float* scores, int64_t count, int64_t number, RowBuffers& scratch) {
  auto& [masked, adjusted, logs, highest, keys, tokens, weights, histogram] = scratch;
  // At least `number` scores reach the `number`-th highest of the blocks' highest ones. Lower scores are left out.
  float lowest = LOWEST;
  highest.clear();
  for_each_block(scores, count, [&](const float* block, int64_t) { highest.push_back(highest_of_block(block)); });
  if (number <= static_cast<int64_t>(highest.size())) {
    logs.assign(highest.begin(), highest.end());
    std::nth_element(logs.begin(), logs.begin() + (number - 1), logs.end(), std::greater<float>());
    lowest = logs[number - 1];
  }
  keys.resize(count + 2 * BLOCK);
  int64_t found = 0;
  for_each_block(scores, count, [&](const float* block, int64_t first) {
    if (highest[first / BLOCK] < lowest) return;
    alignas(64) uint32_t of_block[BLOCK];
    for (int64_t i = 0; i < BLOCK; i++) of_block[i] = ordered(block[i]);
    uint64_t bits = bits_within(of_block, ordered(lowest), UINT32_MAX);
    if (first + BLOCK > count) bits &= (uint64_t{1} << (count - first)) - 1;
    compress(of_block, bits, keys.data() + found);
    found += std::popcount(bits);
  });
  return find_edge(keys.data(), nullptr, found, number, scratch);
}

template <int64_t COUNT = BLOCK>
inline void write_logs(const float* scores, float highest, float scale, float lowest, float* logs) {
  for (int64_t i = 0; i < COUNT; i++) {
    float log = (scores[i] - highest) * scale;
    logs[i] = scores[i] >= lowest ? log : LOWEST;
  }
}

// The sum of the weights of the scores from `lowest` on.
inline int64_t total_weight(const float* scores, int64_t count, float highest, float scale, float lowest) {
  int64_t total = 0;
  for_each_block(scores, count, [&](const float* block, int64_t) {
    alignas(64) float logs[BLOCK];
    write_logs(block, highest, scale, lowest, logs);
    if (highest_of_block(logs) <= NO_WEIGHT) return;
    alignas(64) int64_t weights[BLOCK];
    write_weights(logs, weights);
    for (int64_t i = 0; i < BLOCK; i++) total += weights[i];
  });
  return total;
}

// Keeps the likeliest tokens with the probability top_p, of those with scores from kept.lowest on.
inline Kept nucleus(
    const float* scores, int64_t count, float highest, float scale, double top_p, Kept kept, RowBuffers& scratch) {
  auto& [masked, adjusted, logs, highest_logs, keys, tokens, weights, histogram] = scratch;
  // The sums of the weights by eighths of a bit of their logarithms say in which eighth the edge is. A token and those
  // after it have at most `count` times its weight. If that is less than what is outside, given the weights so far, it
  // is outside too, and not in the sums.
  constexpr float EIGHTHS = 8.0f;
  float lowest_log = NO_WEIGHT;
  int64_t total = 0;
  std::fill_n(histogram.begin(), 4 * (static_cast<int64_t>(-NO_WEIGHT * EIGHTHS) + 1), 0);
  highest_logs.clear();
  for_each_block(scores, count, [&](const float* block, int64_t) {
    alignas(64) float block_logs[BLOCK];
    write_logs(block, highest, scale, kept.lowest, block_logs);
    highest_logs.push_back(highest_of_block(block_logs));
    if (highest_logs.back() <= NO_WEIGHT) return;
    alignas(64) int64_t block_weights[BLOCK];
    write_weights(block_logs, block_weights);
    for (int64_t i = 0; i < BLOCK; i++) total += block_weights[i];
    for (uint64_t bits = bits_between(block_logs, lowest_log, 0.0f); bits != 0; bits &= bits - 1) {
      int64_t i = std::countr_zero(bits);
      histogram[4 * static_cast<int64_t>(block_logs[i] * -EIGHTHS) + i % 4] += block_weights[i];
    }
    double outside = (1 - top_p) * static_cast<double>(total) / static_cast<double>(count);
    constexpr double MANY = 1000;  // so that rounding does not matter
    if (outside > MANY) lowest_log = std::log2(static_cast<float>(outside)) - WEIGHT_BITS - 0.001f;
  });
  auto sum_of = [&](int64_t eighth) {
    const int64_t* sums = &histogram[4 * eighth];
    return sums[0] + sums[1] + sums[2] + sums[3];
  };
  int64_t before = 0, eighth = 0;
  int64_t limit = std::max<int64_t>(1, static_cast<int64_t>(top_p * static_cast<double>(total)));
  for (; before + sum_of(eighth) < limit; eighth++) before += sum_of(eighth);

  float most = static_cast<float>(eighth) / -EIGHTHS, least = static_cast<float>(eighth + 1) / -EIGHTHS;
  logs.resize(count + 2 * BLOCK);
  tokens.resize(count + 2 * BLOCK);
  int64_t found = 0;
  for_each_block(scores, count, [&](const float* block, int64_t first) {
    if (highest_logs[first / BLOCK] <= least) return;
    alignas(64) float block_logs[BLOCK];
    write_logs(block, highest, scale, kept.lowest, block_logs);
    for (uint64_t bits = bits_between(block_logs, least, most); bits != 0; bits &= bits - 1, found++) {
      int64_t i = std::countr_zero(bits);
      logs[found] = block_logs[i];
      tokens[found] = static_cast<int32_t>(first + i);
    }
  });
  keys.resize(found + 2 * BLOCK);
  weights.resize(found + 2 * BLOCK);
  std::fill_n(logs.begin() + found, BLOCK, LOWEST);
  for (int64_t i = 0; i < found; i += BLOCK) write_weights(&logs[i], &weights[i]);
  for (int64_t i = 0; i < found; i++) keys[i] = ordered(scores[tokens[i]]);
  Edge edge = find_edge(keys.data(), weights.data(), found, limit - before, scratch);
  float lowest = score_of(edge.key);
  int64_t its_weight = weight((lowest - highest) * scale);
  int64_t number = (limit - before - edge.before + its_weight - 1) / its_weight;
  const int32_t* last = tokens.data();
  for (;; last++)
    if (scores[*last] == lowest && --number == 0) return {lowest, *last};
}

// As write_logs of tokens from number `first` on, with -inf for those that are not kept.
template <int64_t COUNT = BLOCK>
inline void write_kept_logs(
    const float* scores, int64_t first, float highest, float scale, const Kept& kept, float* logs) {
  write_logs<COUNT>(scores, highest, scale, kept.lowest, logs);
  if (first + COUNT > kept.last_of_lowest)
    for (int64_t i = 0; i < COUNT; i++)
      if (scores[i] == kept.lowest && first + i > kept.last_of_lowest) logs[i] = LOWEST;
  for (int64_t i = 0; i < COUNT; i++) logs[i] = logs[i] >= kept.cutoff ? logs[i] : LOWEST;
  if (std::isinf(kept.farthest)) return;
  for (int64_t i = 0; i < COUNT; i++) logs[i] = std::abs(logs[i] + kept.mean) <= kept.farthest ? logs[i] : LOWEST;
}

// Keeps of those tokens the ones nearest to the mean surprise with the probability typical_p.
inline Kept typical(
    const float* scores, int64_t count, float highest, float scale, double typical_p, Kept kept, RowBuffers& scratch) {
  auto& [masked, adjusted, logs, highest_scores, keys, tokens, weights, histogram] = scratch;
  logs.resize(count + 2 * BLOCK);
  keys.resize(count + 2 * BLOCK);
  weights.resize(count + 2 * BLOCK);
  int64_t found = 0, total = 0, surprise = 0;
  for_each_block(scores, count, [&](const float* block, int64_t first) {
    alignas(64) float block_logs[BLOCK];
    write_kept_logs(block, first, highest, scale, kept, block_logs);
    if (highest_of_block(block_logs) <= NO_WEIGHT) return;
    alignas(64) int64_t block_weights[BLOCK];
    alignas(64) uint32_t of_logs[BLOCK];
    write_weights(block_logs, block_weights);
    for (int64_t i = 0; i < BLOCK; i++) {
      auto its_surprise = static_cast<int64_t>(std::min(-block_logs[i], 63.0f) * static_cast<float>(1 << SURPRISE_BITS));
      total += block_weights[i];
      surprise += block_weights[i] * its_surprise >> SURPRISE_BITS;
      of_logs[i] = ordered(block_logs[i]);
    }
    uint64_t bits = bits_within(of_logs, ordered(NO_WEIGHT) + 1, UINT32_MAX);
    compress(block_logs, bits, logs.data() + found);
    compress(block_weights, bits, weights.data() + found);
    found += std::popcount(bits);
  });
  kept.mean = static_cast<float>(static_cast<double>(surprise) / static_cast<double>(total));
  for (int64_t i = 0; i < found; i++) keys[i] = ~ordered(std::abs(logs[i] + kept.mean));  // the nearest have the highest
  int64_t limit = std::max<int64_t>(1, static_cast<int64_t>(typical_p * static_cast<double>(total)));
  kept.farthest = score_of(~find_edge(keys.data(), weights.data(), found, limit, scratch).key);
  return kept;
}

struct Row {
  const float* logits;
  int64_t vocab_size;
  float scale, cutoff, frequency, presence, repetition;
  double top_p, typical_p;
  int64_t seed, place, top_k;
  const uint8_t *mask, *allowed;
  const int64_t *tokens, *offsets;
  const float* values;
};

inline int64_t draw(const float* scores, float highest, const Row& row, RowBuffers& scratch) {
  int64_t count = row.vocab_size;
  Kept kept;
  if (0 < row.top_k && row.top_k < count)
    kept.lowest = std::max(kept.lowest, score_of(top_edge(scores, count, row.top_k, scratch).key));
  if (row.top_p < 1) kept = nucleus(scores, count, highest, row.scale, row.top_p, kept, scratch);
  kept.cutoff = row.cutoff;
  if (row.typical_p < 1) kept = typical(scores, count, highest, row.scale, row.typical_p, kept, scratch);

  Philox philox(static_cast<uint64_t>(row.seed), Philox::MAX_ROUNDS);
  float best = LOWEST;
  int64_t token = 0;
  for_each_block<DRAWN_BLOCK>(scores, count, [&](const float* block, int64_t first) {
    alignas(64) float logs[DRAWN_BLOCK];
    alignas(64) uint32_t words[DRAWN_BLOCK];
    write_kept_logs<DRAWN_BLOCK>(block, first, highest, row.scale, kept, logs);
    if (highest_of_block<DRAWN_BLOCK>(logs) + HIGHEST_NOISE <= best) return;
    random_words(philox, static_cast<uint32_t>(row.place), first, words);
    // Few blocks have a token that may win, and the others need no logarithms: an exponential random number is at least
    // 0.7213 y, with y = 1 for low words, and log2(2**e * m) is at least e + m - 1, a number's bits.
    int32_t may_win = 0;
    for (int64_t i = 0; i < DRAWN_BLOCK; i++) {
      float folded = static_cast<float>(static_cast<int32_t>(std::min<uint32_t>(~words[i], 0x7fffffff))) + 0.5f;
      float log2_of_y = static_cast<float>(std::bit_cast<int32_t>(folded)) * 0x1p-23f - (127 + 31);
      constexpr float SLACK = 0.4714f + 0.01f;
      may_win |= logs[i] - log2_of_y + SLACK > best;
    }
    if (may_win == 0) return;
    alignas(64) float race[DRAWN_BLOCK];
    for (int64_t i = 0; i < DRAWN_BLOCK; i++) race[i] = logs[i] - log2_of(exponential(words[i]));
    float first_of_block = highest_of_block<DRAWN_BLOCK>(race);
    if (first_of_block <= best) return;
    best = first_of_block;
    token = first + first_equal(race, DRAWN_BLOCK, best);
  });
  return token;
}

// Copies scores, with -inf for tokens whose bit is not set.
inline void copy_allowed(const float* from, const uint8_t* bits, float* to, int64_t count) {
  int64_t i = 0;
#if defined(CPU_CAPABILITY_AVX512)
  for (; i + 16 <= count; i += 16) {
    uint16_t allowed;
    std::memcpy(&allowed, bits + i / 8, sizeof(allowed));
    _mm512_storeu_ps(to + i, _mm512_mask_loadu_ps(_mm512_set1_ps(LOWEST), allowed, from + i));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  for (; i + 8 <= count; i += 8) {
    __m256i allowed = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits[i / 8]), each), each);
    __m256 scores = _mm256_loadu_ps(from + i);
    _mm256_storeu_ps(to + i, _mm256_blendv_ps(_mm256_set1_ps(LOWEST), scores, _mm256_castsi256_ps(allowed)));
  }
#endif
  for (; i < count; i++) to[i] = bits[i / 8] >> i % 8 & 1 ? from[i] : LOWEST;
}

inline const float* masked(const Row& row, RowBuffers& scratch) {
  if (row.mask == nullptr) return row.logits;
  scratch.masked.resize(row.vocab_size);
  copy_allowed(row.logits, row.mask, scratch.masked.data(), row.vocab_size);
  return scratch.masked.data();
}

// As `scores` of ops/sampling.py.
inline const float* adjusted(const float* logits, const Row& row, RowBuffers& scratch) {
  if (row.allowed == nullptr && row.offsets[0] == row.offsets[3]) return logits;
  scratch.adjusted.resize(row.vocab_size);
  float* scores = scratch.adjusted.data();
  std::copy(logits, logits + row.vocab_size, scores);
  const int64_t *tokens = row.tokens, *offsets = row.offsets;
  // Finite scores stay finite.
  auto set = [](float& score, float value) {
    constexpr float MOST = std::numeric_limits<float>::max();
    if (score > LOWEST) score = std::min(std::max(value, -MOST), MOST);
  };
  for (int64_t i = offsets[0]; i < offsets[1]; i++) set(scores[tokens[i]], scores[tokens[i]] + row.values[i]);
  if (row.allowed != nullptr) copy_allowed(scores, row.allowed, scores, row.vocab_size);
  for (int64_t i = offsets[1]; i < offsets[2]; i++) {
    float& score = scores[tokens[i]];
    float value = score - row.frequency * row.values[i] - (row.values[i] > 0 ? row.presence : 0.0f);
    set(score, value > 0 ? value / row.repetition : value * row.repetition);
  }
  for (int64_t i = offsets[2]; i < offsets[3]; i++) scores[tokens[i]] = LOWEST;
  return scores;
}

// Writes log-probabilities [1 + num_top] of a token and the likeliest, and its rank and the likeliest, [1 + num_top].
inline void report(
    const float* logits, int64_t count, float highest, int64_t token, int64_t num_top, float* logprobs, int64_t* about,
    RowBuffers& scratch) {
  constexpr float ALL = std::numeric_limits<float>::lowest();
  double total = static_cast<double>(total_weight(logits, count, highest, LOG2_E, ALL));
  double normalizer = highest + std::log(total * 0x1p-44);
  logprobs[0] = static_cast<float>(logits[token] - normalizer);
  float its_logit = logits[token];
  int32_t rank = 0;
  for (int64_t i = 0; i < count; i++) rank += logits[i] >= its_logit;
  about[0] = rank;
  if (num_top == 0) return;

  Edge edge = top_edge(logits, count, num_top, scratch);
  float lowest = std::max(score_of(edge.key), ALL);
  auto& top = scratch.tokens;
  top.clear();
  int64_t of_lowest = num_top - edge.before;  // the first ones
  for_each_block(logits, count, [&](const float* block, int64_t first) {
    if (scratch.highest[first / BLOCK] < lowest) return;
    for (int64_t i = 0; i < BLOCK; i++)
      if (block[i] > lowest || (block[i] == lowest && of_lowest-- > 0)) top.push_back(static_cast<int32_t>(first + i));
  });
  std::stable_sort(top.begin(), top.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  for (size_t i = 0; i < top.size(); i++) {
    logprobs[1 + i] = static_cast<float>(logits[top[i]] - normalizer);
    about[1 + i] = top[i];
  }
}

// A tensor's pointer after a check of shape and dtype.
template <typename T>
inline const T* checked(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
  check_dense(tensor, name, shape, c10::CppTypeToScalarType<T>::value);
  return tensor.const_data_ptr<T>();
}

inline void check_tokens(const int64_t* tokens, int64_t count, int64_t vocab_size) {
  for (int64_t i = 0; i < count; i++)
    TORCH_CHECK(0 <= tokens[i] && tokens[i] < vocab_size, "there is no token ", tokens[i], " of ", vocab_size);
}

inline void check_num_top(int64_t num_top, int64_t vocab_size) {
  TORCH_CHECK(0 <= num_top && num_top <= vocab_size, num_top, " of ", vocab_size, " tokens are asked for");
}

inline std::pair<at::Tensor, at::Tensor> empty_reports(
    const at::Tensor& like, int64_t rows, int64_t num_top) {
  at::Tensor logprobs = like.new_empty({rows, 1 + num_top}, at::kFloat);
  at::Tensor about = like.new_empty({rows, 1 + num_top}, at::kLong);
  auto* to = logprobs.mutable_data_ptr<float>();
  auto* to_about = about.mutable_data_ptr<int64_t>();
  std::fill(to, to + logprobs.numel(), LOWEST);
  std::fill(to_about, to_about + about.numel(), -1);
  return {logprobs, about};
}

}  // namespace

std::tuple<std::vector<int64_t>, at::Tensor, at::Tensor> choose(
    at::TensorList logits, at::ArrayRef<double> reals, at::IntArrayRef wholes, at::TensorList masks,
    const at::Tensor& tokens, const at::Tensor& values, at::IntArrayRef offsets, int64_t num_top) {
  constexpr size_t REALS = 7, WHOLES = 6, PARTS = 3;
  size_t num_rows = logits.size();
  TORCH_CHECK(num_rows > 0, "there are no logits");
  int64_t vocab_size = check_width(logits[0], "logits");
  std::vector<const float*> rows;
  for (const auto& row : logits) rows.push_back(checked<float>(row, "logits", {vocab_size}));
  TORCH_CHECK(
      reals.size() == REALS * num_rows && wholes.size() == WHOLES * num_rows && offsets.size() == PARTS * num_rows + 1,
      "there are ", reals.size(), ", ", wholes.size(), " and ", offsets.size(), " options of ", num_rows, " rows");
  const auto* token = checked<int64_t>(tokens, "tokens", {-1});
  const auto* value = checked<float>(values, "values", {tokens.numel()});
  check_tokens(token, tokens.numel(), vocab_size);
  check_num_top(num_top, vocab_size);
  TORCH_CHECK(
      std::is_sorted(offsets.begin(), offsets.end()) && offsets.front() == 0 && offsets.back() <= tokens.numel(),
      "offsets do not divide ", tokens.numel(), " tokens");
  std::vector<const uint8_t*> bits;
  for (const auto& mask : masks) {
    bits.push_back(checked<uint8_t>(mask, "mask", {-1}));
    TORCH_CHECK(8 * mask.numel() >= vocab_size, "a mask has ", mask.numel(), " bytes for ", vocab_size, " tokens");
  }
  auto mask_of = [&](int64_t number) { return number < 0 ? nullptr : bits[number]; };
  for (size_t row = 0; row < num_rows; row++) {
    const int64_t* its = &wholes[row * WHOLES];
    TORCH_CHECK(std::max(its[3], its[4]) < static_cast<int64_t>(bits.size()), "row ", row, " has no such mask");
    TORCH_CHECK(its[5] <= num_top, "row ", row, " reports ", its[5], " tokens of ", num_top);
  }

  std::vector<int64_t> chosen(num_rows);
  auto [logprobs, about] = empty_reports(logits[0], num_rows, num_top);
  auto* to_logprobs = logprobs.mutable_data_ptr<float>();
  auto* to_about = about.mutable_data_ptr<int64_t>();
  parallel_tasks(num_rows, 1, [&](int64_t begin, int64_t end) {
    RowBuffers& scratch = RowBuffers::of_this_thread();
    for (int64_t number = begin; number < end; number++) {
      const double* real = &reals[number * REALS];
      const int64_t* whole = &wholes[number * WHOLES];
      auto narrow = [&](int64_t which) { return static_cast<float>(real[which]); };
      Row row{rows[number], vocab_size, narrow(0), narrow(3), narrow(4), narrow(5), narrow(6),
              real[1], real[2], whole[0], whole[1], whole[2], mask_of(whole[3]), mask_of(whole[4]), token,
              &offsets[PARTS * number], value};
      float highest = highest_of(row.logits, vocab_size);
      chosen[number] = NOT_FINITE;
      if (!std::isfinite(highest)) continue;
      const float* its_logits = masked(row, scratch);
      float highest_logit = row.mask == nullptr ? highest : highest_of(its_logits, vocab_size);
      chosen[number] = ALL_MASKED;
      if (!std::isfinite(highest_logit)) continue;
      const float* scores = adjusted(its_logits, row, scratch);
      highest = scores == its_logits ? highest_logit : highest_of(scores, vocab_size);
      chosen[number] = NONE_LEFT;
      if (!std::isfinite(highest)) continue;
      bool is_drawn = row.scale > 0;
      chosen[number] = is_drawn ? draw(scores, highest, row, scratch) : first_equal(scores, vocab_size, highest);
      if (whole[5] >= 0)
        report(
            its_logits, vocab_size, highest_logit, chosen[number], whole[5], to_logprobs + number * (1 + num_top),
            to_about + number * (1 + num_top), scratch);
    }
  });
  return {chosen, logprobs, about};
}

std::tuple<at::Tensor, at::Tensor> token_logprobs(
    const at::Tensor& logits, at::IntArrayRef tokens, int64_t num_top) {
  check_dense(logits, "logits", {-1, -1}, at::kFloat);
  int64_t num_rows = tokens.size(), vocab_size = check_width(logits, "logits");
  TORCH_CHECK(logits.size(0) == num_rows, "there are ", logits.size(0), " rows and ", num_rows, " tokens");
  check_tokens(tokens.data(), num_rows, vocab_size);
  check_num_top(num_top, vocab_size);
  auto [logprobs, about] = empty_reports(logits, num_rows, num_top);
  auto* to_logprobs = logprobs.mutable_data_ptr<float>();
  auto* to_about = about.mutable_data_ptr<int64_t>();
  const auto* from = logits.const_data_ptr<float>();
  parallel_tasks(num_rows, 1, [&](int64_t begin, int64_t end) {
    RowBuffers& scratch = RowBuffers::of_this_thread();
    for (int64_t row = begin; row < end; row++) {
      const float* its_logits = from + row * vocab_size;
      report(
          its_logits, vocab_size, highest_of(its_logits, vocab_size), tokens[row], num_top,
          to_logprobs + row * (1 + num_top), to_about + row * (1 + num_top), scratch);
    }
  });
  return {logprobs, about};
}

}  // namespace granite4_neuron
