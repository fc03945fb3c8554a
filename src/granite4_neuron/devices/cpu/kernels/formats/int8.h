// Weights in int8 with a scale per row, see ops/formats/int8.py. Sums are of whole numbers, scaled once at their end.
#pragma once

#include "../weight.h"

namespace granite4_neuron::int8 {

inline Vec load_int8(const int8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  float values[LANES];
  for (int64_t i = 0; i < LANES; i++) values[i] = from[i];
  return Vec::loadu(values);
#endif
}

struct Rows {
  using Value = int8_t;
  using Scale = float;
  static constexpr int64_t GROUP = LANES;

  static int64_t values_of(int64_t columns) {
    return columns;
  }
  static int64_t scales_of(int64_t) {
    return 1;
  }
  static void quantize(const float* row, int64_t columns, Value* values, Scale* scale) {
    Vec largest(0.0f);
    for (int64_t c = 0; c < columns; c += GROUP) largest = at::vec::maximum(largest, Vec::loadu(row + c).abs());
    *scale = maximum(largest) / LARGEST;
    if (*scale < std::numeric_limits<float>::min()) *scale = 1.0f;
    for (int64_t c = 0; c < columns; c += GROUP) {
      int32_t numbers[LANES];
      at::vec::convert_to_int_of_same_size<float>((Vec::loadu(row + c) / Vec(*scale)).round()).store(numbers);
      int64_t count = std::min(GROUP, columns - c);
      for (int64_t i = 0; i < count; i++) values[c + i] = static_cast<Value>(numbers[i]);
    }
  }

 private:
  static constexpr float LARGEST = 127.0f;
};

// A tile is its steps, followed by the scales of its rows.
template <typename T>
struct Tiles {
  using Value = int8_t;
  using Arithmetic = typename ArithmeticOf<T>::type;
  static constexpr int64_t STEP_BYTES = TILE * Arithmetic::COLUMNS, PREFETCH_BYTES = STEP_BYTES;
  static constexpr bool LOADING_IS_WORK = true;

#if defined(GRANITE4_PAIRS) && defined(__AVX512VBMI__)
  static typename Arithmetic::Operand load_pairs(const char* step) {
    __m512i values = _mm512_loadu_si512(step), sizes = _mm512_abs_epi8(values);
    __m512i low = look_up(LOW, sizes), high = look_up(HIGH, sizes);
    high = _mm512_or_si512(high, _mm512_and_si512(values, _mm512_set1_epi8(-128)));  // the signs
    // -128, which other quantizers write, has been looked up as 0: the lookup takes the lowest seven bits.
    auto is_least = _mm512_cmpeq_epi8_mask(values, _mm512_set1_epi8(-128));
    high = _mm512_mask_mov_epi8(high, is_least, _mm512_set1_epi8(HIGH_OF_LEAST));
    return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  }
#elif defined(GRANITE4_PAIRS)
  static typename Arithmetic::Operand load_pairs(const char* step) {
    __m512i values = _mm512_loadu_si512(step);
    __m512i signs = _mm512_movm_epi8(_mm512_movepi8_mask(values));
    return {as_pairs(_mm512_unpacklo_epi8(values, signs)), as_pairs(_mm512_unpackhi_epi8(values, signs))};
  }
#endif

  template <int PART>
  static typename Arithmetic::Operand load(const char* step) {
#if defined(GRANITE4_PAIRS)
    if constexpr (Arithmetic::COLUMNS == 2) return load_pairs(step);
    else
#endif
    {
      const auto* values = reinterpret_cast<const int8_t*>(step) + PART * PAIR;
      return {load_int8(values), load_int8(values + LANES)};
    }
  }
  // Pairs are ordered so that unpacking bytes, which works on 128-bit lanes, gives the first and the second 16 rows.
  static int64_t offset(int64_t row, int64_t column) {
    if constexpr (Arithmetic::COLUMNS == 1) return row;
    return row % 16 / 4 * 16 + row / 16 * 8 + row % 4 * 2 + column;
  }
  static int64_t scales_offset(int64_t columns) {
    return steps_of<Arithmetic>(columns) * STEP_BYTES;
  }
  static int64_t tile_bytes(int64_t columns) {
    return scales_offset(columns) + TILE * sizeof(float);
  }
  static void finish(const char* tile, int64_t columns, typename Arithmetic::Accumulators& acc) {
    const auto* scales = reinterpret_cast<const float*>(tile + scales_offset(columns));
#pragma GCC unroll 4
    for (int v = 0; v < Arithmetic::VECTORS; v++) acc[v] = acc[v] * Vec::loadu(scales + v * LANES);
  }
  static float value(const char* tile, int64_t columns, int64_t row, int8_t value) {
    return value * reinterpret_cast<const float*>(tile + scales_offset(columns))[row];
  }
  static void add_scales(char* tile, int64_t columns, const float* scales, int64_t count) {
    std::memcpy(tile + scales_offset(columns), scales, count * sizeof(float));
  }
  static void check(const Weight& weight, const at::Tensor& values, const std::optional<at::Tensor>& scales) {
    TORCH_CHECK(scales.has_value() && scales->is_contiguous() && scales->scalar_type() == at::kFloat);
    TORCH_CHECK(scales->numel() == weight.experts * weight.rows && values.numel() == scales->numel() * weight.columns);
  }

#if defined(GRANITE4_PAIRS)
 private:
  // One byte of each of the numbers 0 to 127 in bfloat16, the upper half of float32. bfloat16 represents all whole
  // numbers from -128 to 127, and looking up 64 of them takes half the instructions of converting them.
  static constexpr std::array<uint8_t, 128> bfloat16_bytes(int shift) {
    std::array<uint8_t, 128> bytes{};
    for (int i = 0; i < 128; i++) bytes[i] = std::bit_cast<uint32_t>(static_cast<float>(i)) >> shift & 0xff;
    return bytes;
  }
  static constexpr std::array<uint8_t, 128> LOW = bfloat16_bytes(16), HIGH = bfloat16_bytes(24);
  static constexpr auto HIGH_OF_LEAST = static_cast<char>(std::bit_cast<uint32_t>(-128.0f) >> 24);  // the other is 0
#if defined(__AVX512VBMI__)
  static __m512i look_up(const std::array<uint8_t, 128>& table, __m512i at) {
    return _mm512_permutex2var_epi8(_mm512_loadu_si512(&table[0]), at, _mm512_loadu_si512(&table[64]));
  }
#else
  static __m512i as_pairs(__m512i int16) {
    __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(int16, 16), 16));
    __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(int16, 16));
    __m512i upper = _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(0xffff0000));
    return _mm512_or_si512(upper, _mm512_srli_epi32(_mm512_castps_si512(even), 16));
  }
#endif
#endif
};

}  // namespace granite4_neuron::int8
