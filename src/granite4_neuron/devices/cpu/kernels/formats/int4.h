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
    for (int64_t left = scales_of(columns); left > 0; left -= LANES, row += LANES * GROUP) {
      int64_t count = std::min<int64_t>(LANES, left);
      float lanes[GROUP][LANES] = {};
      for (int64_t g = 0; g < count; g++)
        for (int64_t i = 0; i < GROUP; i++) lanes[i][g] = row[g * GROUP + i];
      Groups numbers;
      for (int64_t i = 0; i < GROUP; i++) numbers[i] = Vec::loadu(lanes[i]);
      Vec scale = best_scales(numbers);
      float its_scales[LANES];
      scale.store(its_scales);
      int32_t codes[GROUP][LANES];
      for (int64_t i = 0; i < GROUP; i++)
        at::vec::convert_to_int_of_same_size<float>(clamped((numbers[i] / scale).round()) + Vec(ZERO)).store(codes[i]);
      for (int64_t g = 0; g < count; g++, values += GROUP / 2) {
        *scales++ = static_cast<Scale>(its_scales[g]);
        for (int64_t i = 0; i < GROUP / 2; i++)
          values[i] = static_cast<Value>(codes[2 * i][g] & 15 | codes[2 * i + 1][g] << 4);
      }
    }
  }

 private:
  using Groups = std::array<Vec, GROUP>;  // the numbers of LANES groups: a lane has those of one group

  static Vec clamped(Vec multiples) {
    return at::vec::clamp(multiples, Vec(-ZERO), Vec(ZERO - 1));
  }

  // The squared errors of the multiples of a scale, and of those of its negative.
  struct Errors {
    Vec of_scale, of_negative;

    Errors operator+(const Errors& other) const {
      return {of_scale + other.of_scale, of_negative + other.of_negative};
    }
  };
  static Errors squared_errors(Vec scale, Vec number) {
    Vec multiple = (number / scale).round();  // of the negative it is the negative
    Vec error = clamped(multiple) * scale - number, other = clamped(multiple.neg()) * scale.neg() - number;
    return {error * error, other * other};
  }
  // The sums over the numbers `first`, `first` + STRIDE, and so on, added up pairwise: one half is added to the other.
  template <int64_t STRIDE = 1>
  static Errors sum_of_errors(Vec scale, const Groups& numbers, int64_t first = 0) {
    if constexpr (STRIDE == GROUP) {
      return squared_errors(scale, numbers[first]);
    } else {
      return sum_of_errors<2 * STRIDE>(scale, numbers, first) +
          sum_of_errors<2 * STRIDE>(scale, numbers, first + STRIDE);
    }
  }

  static Vec best_scales(const Groups& numbers) {
    constexpr std::array<float, 6> UNITS{8.5f, 8.0f, 7.5f, 7.0f, 6.5f, 6.0f};
    constexpr int64_t COUNT = UNITS.size() * LANES;
    Vec largest(0.0f);
    for (const Vec& each : numbers) largest = at::vec::maximum(largest, each.abs());
    largest = Vec::blendv(largest, Vec(UNITS[0]), largest < Vec(std::numeric_limits<float>::min()));
    float candidates[COUNT];
    Scale rounded[COUNT];
    for (size_t i = 0; i < UNITS.size(); i++) (largest / Vec(UNITS[i])).store(candidates + i * LANES);
    from_float(candidates, rounded, COUNT);
    to_float(rounded, candidates, COUNT);
    Vec scale = Vec::loadu(candidates), best(std::numeric_limits<float>::infinity());
    for (size_t i = 0; i < UNITS.size(); i++) {
      Vec candidate = Vec::loadu(candidates + i * LANES);
      auto [of_scale, of_negative] = sum_of_errors(candidate, numbers);
      for (auto [signed_candidate, error] : {std::pair(candidate, of_scale), std::pair(candidate.neg(), of_negative)}) {
        Vec is_better = error < best;
        best = Vec::blendv(best, error, is_better);
        scale = Vec::blendv(scale, signed_candidate, is_better);
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
      TileColumns<Value> block;
      for (int64_t task = begin; task < end; task++) {
        int64_t first = task % tiles * TILE, count = std::min(TILE, weight.rows - first);
        int64_t row = task / tiles * weight.rows + first;
        char* tile = to + task * weight.tile_bytes;
        std::memset(tile, 0, weight.tile_bytes);
        for (int64_t at = 0; at < width; at += block.COLUMNS) {
          int64_t there = std::min(block.COLUMNS, width - at);
          block.read(values + row * width + at, count, there, width);
          for (int64_t i = 0; i < there; i++) {
            int64_t column = 2 * (at + i);
            char *even = tile + offset(0, column), *odd = tile + offset(0, column + 1);
            for (int64_t r = 0; r < HALF; r++) {
              Value lower = block.values[r][i], upper = block.values[r + HALF][i];
              even[r * Arithmetic::COLUMNS] = static_cast<char>(lower & 15 | upper << 4);
              odd[r * Arithmetic::COLUMNS] = static_cast<char>(lower >> 4 | upper & ~15);
            }
          }
        }
        for (int64_t r = 0; r < count; r++)
          for (int64_t g = 0; g < groups; g++) {
            auto* tile_scales = reinterpret_cast<at::BFloat16*>(tile + g * GROUP_BYTES + SCALES);
            tile_scales[r] = static_cast<at::BFloat16>(scales[(row + r) * groups + g]);
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
