// Operators on weights of any format: quantizing, packing, reading rows, products.
#include "experts.h"
#include "linear.h"
#include "packing.h"

#include "buffers.h"
#include "formats.h"
#include "norm.h"
#include "products.h"
#include "profile.h"

namespace granite4_neuron {

// Quantizes each row of a matrix.
//
// weight: [rows, columns] of any floating dtype; values and scales: the tensors of the format's layout.
//
// A format has these members in Rows:
//
//   Value, Scale  the types of values and scales
//   GROUP         the row that `quantize` gets is filled up with zeros to a multiple of this many columns
//   values_of     the number of values in a row, from its number of columns
//   scales_of     the number of its scales
//   quantize      a row in float32 to values and scales
template <typename Rows>
inline void quantize_rows(const at::Tensor& weight, at::Tensor values, at::Tensor scales) {
  using Value = typename Rows::Value;
  using Scale = typename Rows::Scale;
  int64_t rows = weight.size(0), columns = weight.size(1);
  int64_t row_values = Rows::values_of(columns), row_scales = Rows::scales_of(columns);
  TORCH_CHECK(values.is_contiguous() && values.numel() == rows * row_values);
  TORCH_CHECK(scales.is_contiguous() && scales.numel() == rows * row_scales);
  auto* to_values = values.mutable_data_ptr<Value>();
  auto* to_scales = scales.mutable_data_ptr<Scale>();
  GRANITE4_DISPATCH(weight.scalar_type(), "quantize", [&] {
    const auto* from = weight.const_data_ptr<scalar_t>();
    parallel_tasks(rows, 16, [&](int64_t begin, int64_t end) {
      std::vector<float> row((columns + Rows::GROUP - 1) / Rows::GROUP * Rows::GROUP);
      for (int64_t r = begin; r < end; r++) {
        to_float(from + r * columns, row.data(), columns);
        Rows::quantize(row.data(), columns, to_values + r * row_values, to_scales + r * row_scales);
      }
    });
  });
}

void quantize(
    const at::Tensor& weight, const std::string& format, const at::Tensor& values, const at::Tensor& scales) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous());
#define GRANITE4_QUANTIZE_IF_NAMED(NAME, ...) \
  if (format == #NAME) return quantize_rows<NAME::Rows>(weight, values, scales);
  GRANITE4_FORMATS(GRANITE4_QUANTIZE_IF_NAMED)
  TORCH_CHECK(false, "there is no format ", format);
}

int64_t packed_bytes(at::IntArrayRef shape, const std::string& format, at::ScalarType dtype) {
  return weight_of(shape, format, dtype).num_bytes();
}

void pack(
    const at::Tensor& any_values, const std::optional<at::Tensor>& scales, const std::string& format,
    at::ScalarType dtype, at::IntArrayRef shape, at::Tensor bytes) {
  at::Tensor values = any_values.contiguous();
  Weight weight = weight_of(shape, format, dtype);
  TORCH_CHECK(bytes.is_contiguous() && bytes.scalar_type() == at::kByte && bytes.numel() == weight.num_bytes());
  char* to = static_cast<char*>(bytes.mutable_data_ptr());
  GRANITE4_DISPATCH_WEIGHT(weight, "pack", [&] {
    using Value = typename tiles_t::Value;
    constexpr at::ScalarType value_dtype = c10::CppTypeToScalarType<Value>::value;
    TORCH_CHECK(
        values.scalar_type() == value_dtype, "values are ", values.scalar_type(), " and should be ", value_dtype);
    tiles_t::check(weight, values, scales);
    pack_tiles<tiles_t>(
        values.const_data_ptr<Value>(), pointer<float>(scales), weight, to + Weight::HEADER_BYTES);
  });
  std::memset(to, 0, Weight::HEADER_BYTES);
  std::memcpy(to, static_cast<const WeightHeader*>(&weight), sizeof(WeightHeader));
}

at::Tensor weight_rows(const Weight& weight, const at::Tensor& any_ids) {
  at::Tensor ids = any_ids.contiguous();
  auto shape = ids.sizes().vec();
  shape.push_back(weight.columns);
  at::Tensor y = empty(shape, ids.options().dtype(at::kFloat));
  const auto* id = ids.const_data_ptr<int64_t>();
  int64_t num_rows = weight.experts * weight.rows;
  for (int64_t i = 0; i < ids.numel(); i++)
    TORCH_CHECK(0 <= id[i] && id[i] < num_rows, "there is no row ", id[i], " of ", num_rows);
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

// Never destroyed: its threads sleep until the process ends.
ThreadPool& ThreadPool::instance() {
  static ThreadPool* pool = new ThreadPool;
  return *pool;
}

#define GRANITE4_PLUS_ONE(NAME, ...) +1
template <typename T>
Products<T>& products_of(Format format) {
  static std::array<Products<T>, 1 GRANITE4_FORMATS(GRANITE4_PLUS_ONE)> products{};
  return products.at(static_cast<size_t>(format));
}
template Products<float>& products_of<float>(Format);
template Products<at::BFloat16>& products_of<at::BFloat16>(Format);
template Products<at::Half>& products_of<at::Half>(Format);

// The products with a weight, if its format's library is loaded.
template <typename T>
const Products<T>& products_with(const Weight& weight) {
  const auto& products = products_of<T>(weight.format);
  TORCH_CHECK(products.multiply_all != nullptr, "the products with this format are not loaded");
  return products;
}

inline int64_t rows_of(const at::Tensor& x) {
  return x.numel() / x.size(-1);
}

inline std::vector<int64_t> with_last(const at::Tensor& x, int64_t size) {
  auto shape = x.sizes().vec();
  shape.back() = size;
  return shape;
}

inline void check_product(const at::Tensor& x, const Weight& weight) {
  TORCH_CHECK(x.scalar_type() == weight.dtype, "vectors of ", x.scalar_type(), " and weights for ", weight.dtype);
  TORCH_CHECK(check_width(x, "x") == weight.columns, x.size(-1), " values of a vector and ", weight.columns, " columns");
}

at::Tensor linear(const at::Tensor& any_x, const Weight& weight, const std::optional<at::Tensor>& bias) {
  PartOfStep part(Part::products);
  check_product(any_x, weight);
  check_matrix(weight);
  check_bias(weight, bias);
  at::Tensor x = any_x.contiguous(), y = empty(with_last(x, weight.rows), x.options());
  if (y.numel() == 0) return y;
  GRANITE4_DISPATCH(weight.dtype, "linear", [&] {
    products_with<scalar_t>(weight).multiply_all(
        weight, x.const_data_ptr<scalar_t>(), rows_of(x), pointer<scalar_t>(bias), 1.0f,
        y.mutable_data_ptr<scalar_t>());
  });
  return y;
}

at::Tensor logits(const at::Tensor& any_x, const Weight& weight, double scaling) {
  PartOfStep part(Part::head);
  check_product(any_x, weight);
  check_matrix(weight);
  at::Tensor x = any_x.contiguous(), y = empty(with_last(x, weight.rows), x.options().dtype(at::kFloat));
  if (y.numel() == 0) return y;
  GRANITE4_DISPATCH(weight.dtype, "logits", [&] {
    products_with<scalar_t>(weight).multiply_to_float(
        weight, x.const_data_ptr<scalar_t>(), rows_of(x), nullptr, static_cast<float>(1.0 / scaling),
        y.mutable_data_ptr<float>());
  });
  return y;
}

// Puts the indices of the `count` largest values first, among the indices in `order`.
inline void largest_first(const float* values, int64_t count, std::vector<int64_t>& order) {
  // NaN sorts as the largest, as in torch; without that there would be no strict order.
  auto before = [&](int64_t a, int64_t b) {
    if (std::isnan(values[a]) || std::isnan(values[b])) return std::isnan(values[a]) && !std::isnan(values[b]);
    return values[a] > values[b] || (values[a] == values[b] && a < b);
  };
  std::partial_sort(order.begin(), order.begin() + count, order.end(), before);
}

std::pair<at::Tensor, at::Tensor> topk_softmax(const at::Tensor& router_logits, int64_t top_k) {
  check_dense(router_logits, "router_logits", {-1, -1}, at::kFloat);
  TORCH_CHECK(
      0 < top_k && top_k <= router_logits.size(1), "top_k is ", top_k, " of ", router_logits.size(1), " experts");
  int64_t tokens = router_logits.size(0), experts = router_logits.size(1);
  at::Tensor weights = empty({tokens, top_k}, router_logits.options());
  at::Tensor ids = empty({tokens, top_k}, router_logits.options().dtype(at::kLong));
  std::vector<int64_t> order(experts);
  for (int64_t token = 0; token < tokens; token++) {
    const float* scores = router_logits.const_data_ptr<float>() + token * experts;
    std::iota(order.begin(), order.end(), 0);
    largest_first(scores, top_k, order);
    float* weight = weights.mutable_data_ptr<float>() + token * top_k;
    float total = 0.0f;
    for (int64_t k = 0; k < top_k; k++) total += weight[k] = std::exp(scores[order[k]] - scores[order[0]]);
    for (int64_t k = 0; k < top_k; k++) weight[k] /= total;
    std::copy(order.begin(), order.begin() + top_k, ids.mutable_data_ptr<int64_t>() + token * top_k);
  }
  return {weights, ids};
}

std::pair<at::Tensor, at::Tensor> topk_sigmoid(
    const at::Tensor& router_logits, int64_t top_k, const SigmoidChoice& choice) {
  check_dense(router_logits, "router_logits", {-1, -1}, at::kFloat);
  int64_t tokens = router_logits.size(0), experts = router_logits.size(1), groups = choice.n_group;
  check_dense(choice.correction_bias, "correction_bias", {experts}, at::kFloat);
  TORCH_CHECK(
      0 < groups && experts % groups == 0 && (groups == 1 || experts / groups > 1) && 0 < choice.topk_group &&
          choice.topk_group <= groups,
      "there are ", choice.topk_group, " of ", groups, " groups of ", experts, " experts");
  int64_t size = experts / groups;
  TORCH_CHECK(0 < top_k && top_k <= choice.topk_group * size, "top_k is ", top_k, " of ", experts, " experts");
  at::Tensor weights = empty({tokens, top_k}, router_logits.options());
  at::Tensor ids = empty({tokens, top_k}, router_logits.options().dtype(at::kLong));
  const float* bias = choice.correction_bias.const_data_ptr<float>();
  std::vector<float> scores(experts), sums(experts), of_groups(groups);
  std::vector<int64_t> order, pair(size), best_groups(groups);
  for (int64_t token = 0; token < tokens; token++) {
    const float* logits = router_logits.const_data_ptr<float>() + token * experts;
    for (int64_t i = 0; i < experts; i++) {
      scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
      sums[i] = scores[i] + bias[i];
    }
    std::iota(best_groups.begin(), best_groups.end(), 0);
    if (groups > 1) {
      for (int64_t group = 0; group < groups; group++) {
        const float* own = sums.data() + group * size;
        std::iota(pair.begin(), pair.end(), 0);
        largest_first(own, 2, pair);
        of_groups[group] = own[pair[0]] + own[pair[1]];
      }
      largest_first(of_groups.data(), choice.topk_group, best_groups);
    }
    order.clear();
    for (int64_t i = 0; i < choice.topk_group; i++)
      for (int64_t expert = 0; expert < size; expert++) order.push_back(best_groups[i] * size + expert);
    largest_first(sums.data(), top_k, order);
    float* weight = weights.mutable_data_ptr<float>() + token * top_k;
    float total = 0.0f;
    for (int64_t k = 0; k < top_k; k++) total += weight[k] = scores[order[k]];
    for (int64_t k = 0; k < top_k; k++) {
      if (choice.norm_topk_prob) weight[k] /= total + 1e-20f;
      weight[k] *= static_cast<float>(choice.scaling_factor);
    }
    std::copy(order.begin(), order.begin() + top_k, ids.mutable_data_ptr<int64_t>() + token * top_k);
  }
  return {weights, ids};
}

inline std::vector<Group> group_by_expert(const int64_t* topk_ids, int64_t count, int64_t experts) {
  std::vector<Group> groups;
  std::vector<int64_t> group_numbers(experts, -1);
  for (int64_t choice = 0; choice < count; choice++) {
    int64_t expert = topk_ids[choice];
    TORCH_CHECK(0 <= expert && expert < experts, "there is no expert ", expert, " of ", experts);
    if (group_numbers[expert] < 0) {
      group_numbers[expert] = groups.size();
      groups.push_back({expert, {}});
    }
    groups[group_numbers[expert]].choices.push_back(choice);
  }
  return groups;
}

// The groups with the choices of some tokens only, see `ExpertAddition`.
inline std::vector<Group> choices_of(
    const std::vector<Group>& groups, const std::optional<at::Tensor>& tokens, int64_t num_tokens, int64_t top_k) {
  if (!tokens.has_value()) return groups;
  std::vector<bool> is_chosen(num_tokens);
  for (int64_t i = 0; i < tokens->numel(); i++) is_chosen[tokens->const_data_ptr<int64_t>()[i]] = true;
  std::vector<Group> found;
  for (const auto& [expert, choices] : groups) {
    Group group{expert, {}};
    for (int64_t choice : choices)
      if (is_chosen[choice / top_k]) group.choices.push_back(choice);
    if (!group.choices.empty()) found.push_back(group);
  }
  return found;
}

// Adds `additions` to out[choice], the expert's product with inputs[choice / per_input], for all choices of their tokens.
//
// inputs: [tokens * top_k / per_input, columns]; out: [tokens * top_k, rows].
template <typename T>
void add_to_groups(
    const ExpertAdditions& additions, const std::vector<Group>& groups, int64_t tokens, int64_t top_k, const T* inputs,
    int64_t per_input, float* out) {
  int64_t choices = tokens * top_k;
  for (const auto& [down, up, its_tokens] : additions) {
    std::vector<Group> its_groups = choices_of(groups, its_tokens, tokens, top_k);
    Scratch<float> x(choices / per_input * down.columns), reduced(choices * down.rows), sums(choices * up.rows);
    to_float(inputs, x.data(), choices / per_input * down.columns);
    products_with<float>(down).multiply_groups(its_groups, down, x.data(), per_input, reduced.data());
    products_with<float>(up).multiply_groups(its_groups, up, reduced.data(), 1, sums.data());
    parallel_tasks(its_groups.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; g++)
        for (int64_t choice : its_groups[g].choices)
          for (int64_t i = choice * up.rows; i < (choice + 1) * up.rows; i++) out[i] += sums.data()[i];
    });
  }
}

at::Tensor fused_experts(
    const at::Tensor& hidden_states, const Weight& w1, const Weight& w2, const at::Tensor& topk_weights,
    const at::Tensor& topk_ids, const ExpertAdditions& to_w1, const ExpertAdditions& to_w2) {
  PartOfStep part(Part::experts);
  check_product(hidden_states, w1);
  TORCH_CHECK(
      w2.dtype == w1.dtype && w2.format == w1.format && w2.experts == w1.experts &&
          (w1.rows == 2 * w2.columns || w1.rows == w2.columns) && w2.rows == w1.columns,
      "w1 and w2 are not the two matrices of the same experts");
  check_dense(hidden_states, "hidden_states", {-1, w1.columns}, w1.dtype);
  check_dense(topk_ids, "topk_ids", {hidden_states.size(0), -1}, at::kLong);
  check_dense(topk_weights, "topk_weights", topk_ids.sizes(), at::kFloat);
  int64_t tokens = hidden_states.size(0), hidden = hidden_states.size(1), width = w2.columns, top_k = topk_ids.size(1);
  int64_t choices = tokens * top_k;
  at::Tensor output = empty(hidden_states.sizes(), hidden_states.options());
  std::vector<Group> groups = group_by_expert(topk_ids.const_data_ptr<int64_t>(), choices, w1.experts);
  GRANITE4_DISPATCH(w1.dtype, "fused_experts", [&] {
    const auto& products = products_with<scalar_t>(w1);
    Scratch<float> first(choices * w1.rows), y(choices * hidden);
    Scratch<scalar_t> activated(choices * width);
    const auto* x = hidden_states.const_data_ptr<scalar_t>();
    products.multiply_groups(groups, w1, x, top_k, first.data());
    add_to_groups(to_w1, groups, tokens, top_k, x, top_k, first.data());
    parallel_tasks(choices, 8, [&](int64_t begin, int64_t end) {
      for (int64_t choice = begin; choice < end; choice++) {
        const float* from = first.data() + choice * w1.rows;
        scalar_t* to = activated.data() + choice * width;
        if (w1.rows == width) {
          relu2(from, to, width);
        } else {
          silu_and_mul(from, from + width, to, width);
        }
      }
    });
    products.multiply_groups(groups, w2, activated.data(), 1, y.data());
    add_to_groups(to_w2, groups, tokens, top_k, activated.data(), 1, y.data());
    const float* weights = topk_weights.const_data_ptr<float>();
    auto* out = output.mutable_data_ptr<scalar_t>();
    parallel_tasks(tokens, 8, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; token++)
        for (int64_t i = 0; i < hidden; i++) {
          float total = 0.0f;
          for (int64_t choice = token * top_k; choice < (token + 1) * top_k; choice++)
            total += weights[choice] * y.data()[choice * hidden + i];
          out[token * hidden + i] = static_cast<scalar_t>(total);
        }
    });
  });
  return output;
}

}  // namespace granite4_neuron
