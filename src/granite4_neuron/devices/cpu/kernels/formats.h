// The formats of packed weights, and dispatch on a weight's format.
//
// A quantisation NAME is a header formats/NAME.h with a namespace NAME, which has `Tiles<T>` as `PlainTiles` describes
// them and `Rows` for `quantize_rows`. devices/cpu/build.py includes all of these headers in the compiler's command, and
// defines GRANITE4_FORMATS(DO, ...) as DO(NAME, ...) for each of them.
#pragma once

#include "weight.h"

namespace granite4_neuron {

#define GRANITE4_ENUMERATOR(NAME, ...) , NAME
enum class Format : int64_t { plain GRANITE4_FORMATS(GRANITE4_ENUMERATOR) };

// Runs BODY with scalar_t as the C++ type of the vectors that WEIGHT is multiplied by, and tiles_t as its tiles.
#define GRANITE4_DISPATCH_WEIGHT(WEIGHT, OPERATOR, ...)     \
  GRANITE4_DISPATCH((WEIGHT).dtype, OPERATOR, [&] {         \
    switch ((WEIGHT).format) {                              \
      GRANITE4_FORMATS(GRANITE4_CASE_OF_TILES, __VA_ARGS__) \
      default: {                                            \
        using tiles_t = PlainTiles<scalar_t>;               \
        __VA_ARGS__();                                      \
      }                                                     \
    }                                                       \
  })
#define GRANITE4_CASE_OF_TILES(NAME, ...)  \
  case Format::NAME: {                     \
    using tiles_t = NAME::Tiles<scalar_t>; \
    __VA_ARGS__();                         \
    break;                                 \
  }

inline Format format_named(const std::string& name) {
  if (name == "plain") return Format::plain;
#define GRANITE4_RETURN_IF_NAMED(NAME, ...) if (name == #NAME) return Format::NAME;
  GRANITE4_FORMATS(GRANITE4_RETURN_IF_NAMED)
  TORCH_CHECK(false, "there is no format ", name);
}

// A weight of this shape, [rows, columns] or [experts, rows, columns], without its tiles.
inline Weight weight_of(at::IntArrayRef shape, const std::string& format, at::ScalarType dtype) {
  TORCH_CHECK(
      shape.size() == 2 || shape.size() == 3, "a weight has the shape ", shape, " and should have 2 or 3 dimensions");
  Weight weight;
  weight.dtype = dtype;
  weight.format = format_named(format);
  weight.experts = shape.size() == 3 ? shape[0] : 1;
  weight.rows = shape[shape.size() - 2];
  weight.columns = shape[shape.size() - 1];
  constexpr double MAX_VALUES = 0x1p48;  // values
  TORCH_CHECK(
      weight.experts >= 0 && weight.rows >= 0 && weight.columns > 0 &&
          static_cast<double>(std::max<int64_t>(1, weight.experts)) * std::max<int64_t>(1, weight.rows) *
                  weight.columns <= MAX_VALUES,
      "a weight has the shape ", shape);
  GRANITE4_DISPATCH_WEIGHT(weight, "weight_of", [&] { weight.tile_bytes = tiles_t::tile_bytes(weight.columns); });
  return weight;
}

}  // namespace granite4_neuron
