// Weights of bfloat16 in 12 bits without loss, see ops/formats/lossless12.py. A product has the same bits as with plain
// weights, because loading a step restores the original values.
#pragma once

#include "../weight.h"

namespace granite4_neuron::lossless12 {

struct Rows {
  using Value = uint8_t;
  using Scale = uint8_t;
  static constexpr int64_t GROUP = LANES;
  static constexpr int CODES = 15, EXPONENTS = 256;  // exponents from the row's least coded one; code 15 marks others
  static constexpr int64_t MANTISSA_BITS = 7;
  // Scales begin with the least exponent and the number of others.
  static constexpr int64_t HEADER = 2;

  // The number of exponents that fit after the header.
  static int64_t room(int64_t columns) {
    return std::clamp<int64_t>(columns / 128, 8, 254);
  }
  static int64_t values_of(int64_t columns) {
    return columns + (columns + 1) / 2;
  }
  static int64_t scales_of(int64_t columns) {
    return HEADER + room(columns);
  }
  static void quantize(const float* row, int64_t columns, Value* values, Scale* scales) {
    auto bits_of = [&](int64_t column) { return static_cast<at::BFloat16>(row[column]).x; };
    auto exponent_of = [](uint16_t bits) { return bits >> MANTISSA_BITS & (EXPONENTS - 1); };
    std::array<int64_t, EXPONENTS> counts{};
    for (int64_t column = 0; column < columns; column++) counts[exponent_of(bits_of(column))]++;
    int least = best_window(counts);
    int64_t others = 0;
    std::fill(scales, scales + scales_of(columns), 0);
    std::fill(values + columns, values + values_of(columns), 0);
    for (int64_t column = 0; column < columns; column++) {
      uint16_t bits = bits_of(column);
      int exponent = exponent_of(bits), code = exponent - least;
      if (code < 0 || code >= CODES) {
        code = CODES;
        if (others < room(columns)) scales[HEADER + others] = exponent;
        others++;
      }
      values[column] = bits >> 8 & 0x80 | bits & 0x7f;
      values[columns + column / 2] |= code << column % 2 * 4;
    }
    scales[0] = least;
    scales[1] = std::min<int64_t>(others, 255);
  }

 private:
  // The first of the CODES consecutive exponents that cover the most values.
  static int best_window(const std::array<int64_t, EXPONENTS>& counts) {
    int best = 0;
    int64_t inside = std::accumulate(counts.begin(), counts.begin() + CODES, int64_t{0}), most = inside;
    for (int least = 1; least + CODES <= EXPONENTS; least++) {
      inside += counts[least + CODES - 1] - counts[least - 1];
      if (inside > most) {
        most = inside;
        best = least;
      }
    }
    return best;
  }
};

// A value is the bits of its row's least exponent plus 12 bits of its own: sign, code and mantissa. The lowest code bit
// and the mantissa are a byte; the sign and the other code bits are half of one. A step is all bytes, followed by all
// halves. A value with another exponent has the code 0, and what must be added to it is in a list.
//
// A tile is the bits of the least exponents, for each value of a step; that list, in the order of columns, with an end
// mark; and the steps.
template <typename T>
struct Tiles {
  using Value = uint8_t;
  using Arithmetic = typename ArithmeticOf<T>::type;
  static constexpr int64_t STEP_VALUES = TILE * Arithmetic::COLUMNS;
  static constexpr int64_t STEP_BYTES = STEP_VALUES * 3 / 2, PREFETCH_BYTES = STEP_BYTES;
  static constexpr bool LOADING_IS_WORK = true;

  // Loads the steps of a tile, each once and in order.
  class Reader {
   public:
    Reader(const char* tile, int64_t columns)
        : least_(tile), next_(list_in(tile)), steps_(tile + steps_offset(columns)), step_of_next_(step_of(*next_)) {}

    template <int PART>
    typename Arithmetic::Operand load(const char* step) {
      auto operand = unpack<PART>(step, least_);
      if (step == step_of_next_) [[unlikely]] add_others<PART>(operand);
      return operand;
    }

   private:
    const char* least_;
    const uint32_t* next_;
    const char* steps_;
    const char* step_of_next_;

    const char* step_of(uint32_t other) const {
      return steps_ + column_of(other) / Arithmetic::COLUMNS * STEP_BYTES;
    }

    template <int PART>
    void add_others(typename Arithmetic::Operand& operand) {
      using Bits = std::conditional_t<Arithmetic::COLUMNS == 1, uint32_t, uint16_t>;  // bfloat16 is the upper half
      constexpr int64_t VALUES = sizeof(operand) / sizeof(Bits), SHIFT = 8 * (sizeof(Bits) - sizeof(uint16_t));
      Bits values[VALUES];
      std::memcpy(values, &operand, sizeof(operand));
      const uint32_t* other = next_;
      for (; step_of(*other) == step_of_next_; other++) {
        int64_t place = row_of(*other) * Arithmetic::COLUMNS + column_of(*other) % Arithmetic::COLUMNS - PART * VALUES;
        if (0 <= place && place < VALUES) values[place] += static_cast<Bits>(bits_of(*other)) << SHIFT;
      }
      std::memcpy(&operand, values, sizeof(operand));
      if constexpr (PART == Arithmetic::VECTORS / 2 - 1) {
        next_ = other;
        step_of_next_ = step_of(*other);
      }
    }
  };

  static int64_t steps_offset(int64_t columns) {
    return LIST_OFFSET + whole_lines((TILE * Rows::room(columns) + 1) * sizeof(uint32_t));
  }
  static int64_t tile_bytes(int64_t columns) {
    return steps_offset(columns) + whole_lines(steps_of<Arithmetic>(columns) * STEP_BYTES);
  }
  static void finish(const char*, int64_t, typename Arithmetic::Accumulators&) {}

  // values: [rows, values_of(columns)]; scales: [rows, scales_of(columns)]; both of all experts.
  static void pack(const Value* values, const float* scales, const Weight& weight, char* to) {
    int64_t tiles = tiles_of(weight.rows), row_values = Rows::values_of(weight.columns);
    int64_t row_scales = Rows::scales_of(weight.columns);
    parallel_tasks(weight.experts * tiles, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; task++) {
        int64_t first = task % tiles * TILE, count = std::min(TILE, weight.rows - first);
        int64_t row = task / tiles * weight.rows + first;
        char* tile = to + task * weight.tile_bytes;
        std::memset(tile, 0, weight.tile_bytes);
        std::vector<uint32_t> list;
        for (int64_t r = 0; r < count; r++)
          pack_row(values + (row + r) * row_values, scales + (row + r) * row_scales, r, weight.columns, tile, list);
        std::sort(list.begin(), list.end());
        list.push_back(END);
        std::memcpy(tile + LIST_OFFSET, list.data(), list.size() * sizeof(uint32_t));
      }
    });
  }

  static void read_row(const char* tile, int64_t row, int64_t columns, float* to) {
    auto as_float = [](uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); };
    std::vector<uint16_t> bits(columns);
    uint16_t least;
    std::memcpy(&least, tile + row * Arithmetic::COLUMNS * sizeof(least), sizeof(least));
    for (int64_t column = 0; column < columns; column++) {
      const char* step = tile + steps_offset(columns) + column / Arithmetic::COLUMNS * STEP_BYTES;
      bits[column] = least + own_bits(step, place_of(row, column % Arithmetic::COLUMNS));
    }
    for (const uint32_t* other = list_in(tile); *other != END; other++)
      if (row_of(*other) == row) bits[column_of(*other)] += bits_of(*other);
    for (int64_t column = 0; column < columns; column++) to[column] = as_float(bits[column]);
  }

  static void check(const Weight& weight, const at::Tensor& values, const std::optional<at::Tensor>& scales) {
    TORCH_CHECK(scales.has_value() && scales->is_contiguous() && scales->scalar_type() == at::kFloat);
    int64_t rows = weight.experts * weight.rows;
    TORCH_CHECK(
        values.numel() == rows * Rows::values_of(weight.columns) &&
        scales->numel() == rows * Rows::scales_of(weight.columns));
    TORCH_CHECK(
        weight.columns < column_of(END), "a row has ", weight.columns, " columns, and should have fewer than ",
        column_of(END));
  }

 private:
  static constexpr int64_t LIST_OFFSET = STEP_VALUES * sizeof(uint16_t);
  // An element of the list: column, row, and a difference of exponents of 9 bits.
  static constexpr int COLUMN_SHIFT = 14, ROW_SHIFT = 9, DIFFERENCE = (1 << ROW_SHIFT) - 1;
  static constexpr uint32_t END = 0xffffffff;

  static int64_t whole_lines(int64_t bytes) {
    return (bytes + 63) / 64 * 64;
  }
  static const uint32_t* list_in(const char* tile) {
    return reinterpret_cast<const uint32_t*>(tile + LIST_OFFSET);
  }
  static int64_t column_of(uint32_t other) {
    return other >> COLUMN_SHIFT;
  }
  static int64_t row_of(uint32_t other) {
    return other >> ROW_SHIFT & (TILE - 1);
  }
  static uint16_t bits_of(uint32_t other) {
    return static_cast<uint16_t>((other & DIFFERENCE) << Rows::MANTISSA_BITS);
  }

  // The number of a value in its step. Pairs are ordered so that unpacking bytes, which works on 128-bit lanes, gives
  // the first and the second 16 rows.
  static int64_t place_of(int64_t row, int64_t column) {
    if constexpr (Arithmetic::COLUMNS == 1) return row;
    return row % 16 / 4 * 16 + row / 16 * 8 + row % 4 * 2 + column;
  }
  // The lower halves of bytes belong to the step's first values.
  static constexpr int64_t HALF = STEP_VALUES / 2;

  static uint16_t own_bits(const char* step, int64_t place) {
    auto low = static_cast<uint8_t>(step[place]), halves = static_cast<uint8_t>(step[STEP_VALUES + place % HALF]);
    return static_cast<uint16_t>(UPPER_BYTES[halves >> (place < HALF ? 0 : 4) & 15] << 8 | low);
  }

  static void pack_row(
      const Value* values, const float* scales, int64_t row, int64_t columns, char* tile,
      std::vector<uint32_t>& list) {
    int least = static_cast<int>(scales[0]);
    auto least_bits = static_cast<uint16_t>(least << Rows::MANTISSA_BITS);
    for (int64_t column = 0; column < Arithmetic::COLUMNS; column++)
      std::memcpy(
          tile + (row * Arithmetic::COLUMNS + column) * sizeof(least_bits), &least_bits, sizeof(least_bits));
    int64_t others = 0;
    for (int64_t column = 0; column < columns; column++) {
      int code = values[columns + column / 2] >> column % 2 * 4 & 15;
      if (code == Rows::CODES) {
        code = 0;
        if (others < Rows::room(columns)) {
          int difference = static_cast<int>(scales[Rows::HEADER + others++]) - least;
          list.push_back(static_cast<uint32_t>(column << COLUMN_SHIFT | row << ROW_SHIFT | difference & DIFFERENCE));
        }
      }
      char* step = tile + steps_offset(columns) + column / Arithmetic::COLUMNS * STEP_BYTES;
      int64_t place = place_of(row, column % Arithmetic::COLUMNS);
      int half = values[column] >> 4 & 8 | code >> 1;
      step[place] = static_cast<char>(code << 7 | values[column] & 0x7f);
      step[STEP_VALUES + place % HALF] |= static_cast<char>(place < HALF ? half : half << 4);
    }
  }

  // Upper bytes by halves of bytes: the sign, and the upper three bits of the code.
  static constexpr std::array<uint8_t, 16> UPPER_BYTES = [] {
    std::array<uint8_t, 16> bytes{};
    for (int half = 0; half < 16; half++) bytes[half] = (half & 8) << 4 | half & 7;
    return bytes;
  }();

  // Two of a step's vectors, before the corrections of single values.
  template <int PART>
  static typename Arithmetic::Operand unpack(const char* step, const char* least) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
    auto load16 = [](const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); };
    const __m128i table = load16(UPPER_BYTES.data());
#endif
#if defined(GRANITE4_PAIRS)
    if constexpr (Arithmetic::COLUMNS == 2) {
      const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(4), 1);
      __m512i halves = _mm512_broadcast_i64x4(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step + STEP_VALUES)));
      halves = _mm512_and_si512(_mm512_srlv_epi32(halves, shifts), _mm512_set1_epi8(15));
      __m512i low = _mm512_loadu_si512(step), high = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), halves);
      return {_mm512_add_epi16(_mm512_unpacklo_epi8(low, high), _mm512_loadu_si512(least)),
              _mm512_add_epi16(_mm512_unpackhi_epi8(low, high), _mm512_loadu_si512(least + sizeof(__m512i)))};
    }
#endif
    if constexpr (Arithmetic::COLUMNS == 1) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
      // 16 rows as bfloat16 in two registers.
      auto rows = [&](int64_t first) {
        __m128i halves = load16(step + STEP_VALUES);
        if (first >= HALF) halves = _mm_srli_epi16(halves, 4);
        __m128i low = load16(step + first);
        __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(halves, _mm_set1_epi8(15)));
        const char* of_rows = least + first * sizeof(uint16_t);
        return std::pair(
            _mm_add_epi16(_mm_unpacklo_epi8(low, high), load16(of_rows)),
            _mm_add_epi16(_mm_unpackhi_epi8(low, high), load16(of_rows + sizeof(__m128i))));
      };
#endif
#if defined(CPU_CAPABILITY_AVX512)
      auto widen = [](auto bfloat16) {
        __m256i both = _mm256_set_m128i(bfloat16.second, bfloat16.first);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16));
      };
      return {widen(rows(0)), widen(rows(HALF))};
#elif defined(CPU_CAPABILITY_AVX2)
      auto widen = [](__m128i bfloat16) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bfloat16), 16));
      };
      auto [first, second] = rows(PART * HALF);
      return {widen(first), widen(second)};
#else
      uint32_t bits[PAIR];
      for (int64_t i = 0; i < PAIR; i++) {
        int64_t row = PART * PAIR + i;
        uint16_t of_row;
        std::memcpy(&of_row, least + row * sizeof(of_row), sizeof(of_row));
        bits[i] = static_cast<uint32_t>(static_cast<uint16_t>(of_row + own_bits(step, row))) << 16;
      }
      float values[PAIR];
      std::memcpy(values, bits, sizeof(bits));
      return {Vec::loadu(values), Vec::loadu(values + LANES)};
#endif
    }
  }
};

}  // namespace granite4_neuron::lossless12
