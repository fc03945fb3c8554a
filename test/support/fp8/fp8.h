// Weights in float8 e4m3 with a scale per row, see fp8.py.
#pragma once

#include <c10/util/Float8_e4m3fn.h>

#include "int8.h"

namespace granite4_neuron::fp8 {

struct Rows : int8::Rows {
  using Value = c10::Float8_e4m3fn;

  static void quantize(const float* row, int64_t columns, Value* values, Scale* scale) {
    *scale = 0.0f;
    for (int64_t c = 0; c < columns; c++) *scale = std::isnan(row[c]) ? row[c] : std::max(*scale, std::abs(row[c]));
    *scale /= 448.0f;
    if (*scale < std::numeric_limits<float>::min()) *scale = 1.0f;
    for (int64_t c = 0; c < columns; c++) values[c] = static_cast<Value>(row[c] / *scale);
  }
};

// Steps and scales are laid out as int8's.
template <typename T>
struct Tiles : int8::Tiles<T> {
  using Value = c10::Float8_e4m3fn;
  using Base = int8::Tiles<T>;
  using typename Base::Arithmetic;

  template <int PART>
  static typename Arithmetic::Operand load(const char* step) {
    using Input = typename Arithmetic::Input;
    constexpr int64_t COLUMNS = Arithmetic::COLUMNS;
    Input values[PAIR * COLUMNS];
    for (int64_t r = 0; r < PAIR; r++)
      for (int64_t c = 0; c < COLUMNS; c++) {
        Value value;
        std::memcpy(&value, step + Base::offset(PART * PAIR + r, c), sizeof(value));
        values[r * COLUMNS + c] = static_cast<Input>(static_cast<float>(value));
      }
    const char* loaded = reinterpret_cast<const char*>(values);
    return {Arithmetic::load(loaded), Arithmetic::load(loaded + sizeof(values) / 2)};
  }
  static float value(const char* tile, int64_t columns, int64_t row, Value value) {
    return static_cast<float>(value) * reinterpret_cast<const float*>(tile + Base::scales_offset(columns))[row];
  }
};

}  // namespace granite4_neuron::fp8
