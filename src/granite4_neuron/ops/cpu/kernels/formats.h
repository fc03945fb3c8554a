// The formats of packed weights, and the functions that depend on a weight's format.
//
// A quantisation NAME is a header formats/NAME.h with a namespace NAME, which has `Tiles<T>` as `PlainTiles` describes
// them and `Rows` for `quantize_rows`. ops/cpu/build.py includes all of these headers in the compiler's command, and
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
  TORCH_CHECK(shape.size() == 2 || shape.size() == 3, "a weight has the shape ", shape);
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

inline int64_t packed_bytes(at::IntArrayRef shape, const std::string& format, at::ScalarType dtype) {
  return weight_of(shape, format, dtype).num_bytes();
}

// Packs a matrix, or one of each expert, into `bytes`, which has room for `packed_bytes`.
//
// shape: of the matrix, [..., rows, columns]. values: of dtype and this shape, or as the format has them; scales: as
// the format has them, or none.
inline void pack(
    const at::Tensor& any_values, const std::optional<at::Tensor>& scales, const std::string& format,
    at::ScalarType dtype, at::IntArrayRef shape, at::Tensor bytes) {
  at::Tensor values = any_values.contiguous();
  Weight weight = weight_of(shape, format, dtype);
  TORCH_CHECK(bytes.is_contiguous() && bytes.scalar_type() == at::kByte && bytes.numel() == weight.num_bytes());
  char* to = static_cast<char*>(bytes.mutable_data_ptr());
  GRANITE4_DISPATCH_WEIGHT(weight, "pack", [&] {
    using Value = typename tiles_t::Value;
    TORCH_CHECK(values.scalar_type() == c10::CppTypeToScalarType<Value>::value, "values are ", values.scalar_type());
    tiles_t::check(weight, values, scales);
    pack_tiles<tiles_t>(
        values.const_data_ptr<Value>(), pointer<float>(scales), weight, to + Weight::HEADER_BYTES);
  });
  std::memset(to, 0, Weight::HEADER_BYTES);
  std::memcpy(to, static_cast<const WeightHeader*>(&weight), sizeof(WeightHeader));
}

// Reads rows `ids` of a weight, in float32: [..., columns]. Rows are numbered through all experts.
inline at::Tensor weight_rows(const Weight& weight, const at::Tensor& any_ids) {
  at::Tensor ids = any_ids.contiguous();
  auto shape = ids.sizes().vec();
  shape.push_back(weight.columns);
  at::Tensor y = at::empty(shape, ids.options().dtype(at::kFloat));
  const auto* id = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); i++)
    TORCH_CHECK(0 <= id[i] && id[i] < weight.experts * weight.rows, "there is no row ", id[i]);
  GRANITE4_DISPATCH_WEIGHT(weight, "weight_rows", [&] {
    auto* to = y.mutable_data_ptr<float>();
    parallel_tasks(ids.numel(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        int64_t expert = id[i] / weight.rows, row = id[i] % weight.rows;
        read_row<tiles_t>(weight.tile(expert, row / TILE), row % TILE, weight.columns, to + i * weight.columns);
      }
    });
  });
  return y;
}

}  // namespace granite4_neuron
