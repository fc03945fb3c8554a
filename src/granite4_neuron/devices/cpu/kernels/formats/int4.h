// Weights in four bits with a scale per row and group of 32 columns, see ops/formats/int4.py. Sums over a group are of
// whole numbers, scaled once at their end.
#pragma once

#include "int8.h"

namespace granite4_neuron::int4 {

struct Rows {
  using Value = uint8_t;
  using Scale = at::BFloat16;
  static constexpr int64_t GROUP = 32, ZERO = 8;  // columns that share a scale; the code of 0

  static int64_t values_of(int64_t columns) {
    return scales_of(columns) * GROUP / 2;
  }
  static int64_t scales_of(int64_t columns) {
    return (columns + GROUP - 1) / GROUP;
  }
  static void quantize(const float* row, int64_t columns, Value* values, Scale* scales) {
    for (int64_t g = 0; g < scales_of(columns); g++, values += GROUP / 2) {
      Values group;
      for (int64_t v = 0; v < VECTORS; v++) group[v] = Vec::loadu(row + g * GROUP + v * LANES);
      scales[g] = best_scale(group);
      int32_t numbers[GROUP];
      Values multiples = multiples_of(scales[g], group);
      for (int64_t v = 0; v < VECTORS; v++)
        at::vec::convert_to_int_of_same_size<float>(multiples[v] + Vec(ZERO)).store(numbers + v * LANES);
      for (int64_t i = 0; i < GROUP / 2; i++)
        values[i] = static_cast<Value>(numbers[2 * i] & 15 | numbers[2 * i + 1] << 4);
    }
  }

 private:
  static constexpr int64_t VECTORS = GROUP / LANES;
  using Values = std::array<Vec, VECTORS>;

  static Values multiples_of(float scale, const Values& group) {
    Values multiples;
    for (int64_t v = 0; v < VECTORS; v++)
      multiples[v] = at::vec::clamp((group[v] / Vec(scale)).round(), Vec(-ZERO), Vec(ZERO - 1));
    return multiples;
  }

  // The sum of the squared errors of a scale's multiples, summed pairwise: one half is added to the other, and so on.
  static float squared_error(float scale, const Values& group) {
    Values squares = multiples_of(scale, group);
    for (int64_t v = 0; v < VECTORS; v++) {
      Vec error = squares[v] * Vec(scale) - group[v];
      squares[v] = error * error;
    }
    for (int64_t half = VECTORS / 2; half > 0; half /= 2)
      for (int64_t v = 0; v < half; v++) squares[v] = squares[v] + squares[v + half];
    float values[LANES];
    squares[0].store(values);
    for (int64_t half = LANES / 2; half > 0; half /= 2)
      for (int64_t i = 0; i < half; i++) values[i] += values[i + half];
    return values[0];
  }

  static Scale best_scale(const Values& group) {
    constexpr std::array<float, 6> UNITS{8.5f, 8.0f, 7.5f, 7.0f, 6.5f, 6.0f};
    Vec largest_of_lanes(0.0f);
    for (const Vec& values : group) largest_of_lanes = at::vec::maximum(largest_of_lanes, values.abs());
    float largest = maximum(largest_of_lanes), best = std::numeric_limits<float>::infinity();
    if (largest < std::numeric_limits<float>::min()) largest = UNITS[0];
    auto scale = static_cast<Scale>(largest / UNITS[0]);
    for (float units : UNITS)
      for (float signed_units : {units, -units}) {
        auto candidate = static_cast<Scale>(largest / signed_units);
        float error = squared_error(candidate, group);
        if (error < best) {
          best = error;
          scale = candidate;
        }
      }
    return scale;
  }
};

// A tile is one group after another: the group's steps, followed by the scales of its rows in bfloat16. In a step the
// lower halves of bytes are rows 0 to 15, the upper ones rows 16 to 31.
template <typename T>
struct Tiles {
  using Value = uint8_t;  // two columns of a row
  using Arithmetic = typename ArithmeticOf<T>::type;
  static constexpr int64_t GROUP = Rows::GROUP, ZERO = Rows::ZERO, HALF = TILE / 2;
  static constexpr int64_t STEP_BYTES = HALF * Arithmetic::COLUMNS, PREFETCH_BYTES = STEP_BYTES;
  static constexpr int64_t SCALES = GROUP / Arithmetic::COLUMNS * STEP_BYTES;
  static constexpr int64_t GROUP_BYTES = SCALES + TILE * sizeof(at::BFloat16);
  static constexpr bool LOADING_IS_WORK = Arithmetic::COLUMNS == 1;

  template <int PART>
  static typename Arithmetic::Operand load(const char* step) {
#if defined(GRANITE4_PAIRS)
    if constexpr (Arithmetic::COLUMNS == 2) {
      // The lookup takes the lowest five bits; the fifth is the other number's.
      const __m512i table = _mm512_loadu_si512(NUMBERS.data());
      __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(step)));
      return {_mm512_permutexvar_epi16(bytes, table),
              _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table)};
    }
#endif
    if constexpr (Arithmetic::COLUMNS == 1) {
#if defined(CPU_CAPABILITY_AVX512)
      // The lookup takes the lowest four bits.
      const __m512 table = _mm512_loadu_ps(FLOATS.data());
      __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(step)));
      return {_mm512_permutexvar_ps(bytes, table), _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table)};
#elif defined(CPU_CAPABILITY_AVX2)
      __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(step));
      if constexpr (PART == 1) bytes = _mm_srli_epi16(bytes, 4);
      __m128i numbers = _mm_sub_epi8(_mm_and_si128(bytes, _mm_set1_epi8(15)), _mm_set1_epi8(ZERO));
      __m256i first = _mm256_cvtepi8_epi32(numbers), second = _mm256_cvtepi8_epi32(_mm_srli_si128(numbers, 8));
      return {_mm256_cvtepi32_ps(first), _mm256_cvtepi32_ps(second)};
#else
      int8_t values[PAIR];
      for (int64_t r = 0; r < PAIR; r++) {
        int64_t row = PART * PAIR + r;
        values[r] = static_cast<int8_t>((step[row % HALF] >> (row < HALF ? 0 : 4) & 15) - ZERO);
      }
      return {int8::load_int8(values), int8::load_int8(values + LANES)};
#endif
    }
  }

  static int64_t tile_bytes(int64_t columns) {
    return Rows::scales_of(columns) * GROUP_BYTES;
  }
  static void finish(const char*, int64_t, typename Arithmetic::Accumulators&) {}

  static typename Arithmetic::Accumulators group_scales(const char* group) {
    const auto* stored = reinterpret_cast<const at::BFloat16*>(group + SCALES);
    typename Arithmetic::Accumulators scales;
    for_each<Arithmetic::VECTORS / 2>([&](auto pair) {
      std::tie(scales[2 * pair], scales[2 * pair + 1]) = load_pair(stored + 2 * pair * LANES);
    });
    return scales;
  }

  // values: [rows, columns of whole groups / 2]; scales: [rows, groups]; both for all experts.
  static void pack(const Value* values, const float* scales, const Weight& weight, char* to) {
    int64_t tiles = tiles_of(weight.rows), groups = Rows::scales_of(weight.columns), width = groups * GROUP / 2;
    parallel_tasks(weight.experts * tiles, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; task++) {
        int64_t first = task % tiles * TILE, count = std::min(TILE, weight.rows - first);
        int64_t row = task / tiles * weight.rows + first;
        char* tile = to + task * weight.tile_bytes;
        std::memset(tile, 0, weight.tile_bytes);
        for (int64_t r = 0; r < count; r++) {
          for (int64_t column = 0; column < groups * GROUP; column++) {
            int number = values[(row + r) * width + column / 2] >> column % 2 * 4 & 15;
            tile[offset(r, column)] |= static_cast<char>(r < HALF ? number : number << 4);
          }
          for (int64_t g = 0; g < groups; g++) {
            auto* tile_scales = reinterpret_cast<at::BFloat16*>(tile + g * GROUP_BYTES + SCALES);
            tile_scales[r] = static_cast<at::BFloat16>(scales[(row + r) * groups + g]);
          }
        }
      }
    });
  }

  static void read_row(const char* tile, int64_t row, int64_t columns, float* to) {
    for (int64_t column = 0; column < columns; column++) {
      auto byte = static_cast<uint8_t>(tile[offset(row, column)]);
      const auto* scales = reinterpret_cast<const at::BFloat16*>(tile + column / GROUP * GROUP_BYTES + SCALES);
      to[column] = static_cast<float>((row < HALF ? byte & 15 : byte >> 4) - ZERO) * static_cast<float>(scales[row]);
    }
  }

  static void check(const Weight& weight, const at::Tensor& values, const std::optional<at::Tensor>& scales) {
    TORCH_CHECK(scales.has_value() && scales->is_contiguous() && scales->scalar_type() == at::kFloat);
    int64_t groups = weight.experts * weight.rows * Rows::scales_of(weight.columns);
    TORCH_CHECK(scales->numel() == groups && values.numel() == groups * GROUP / 2);
  }

 private:
  static int64_t offset(int64_t row, int64_t column) {
    constexpr int64_t STEP = Arithmetic::COLUMNS;
    return column / GROUP * GROUP_BYTES + column % GROUP / STEP * STEP_BYTES + row % HALF * STEP + column % STEP;
  }

  static constexpr std::array<float, 16> FLOATS = [] {  // -8 to 7
    std::array<float, 16> numbers{};
    for (int i = 0; i < 16; i++) numbers[i] = static_cast<float>(i - ZERO);
    return numbers;
  }();
  // The same numbers in bfloat16, the upper half of float32, twice.
  static constexpr std::array<uint16_t, 32> NUMBERS = [] {
    std::array<uint16_t, 32> numbers{};
    for (int i = 0; i < 32; i++) numbers[i] = std::bit_cast<uint32_t>(FLOATS[i % 16]) >> 16;
    return numbers;
  }();
};

}  // namespace granite4_neuron::int4
