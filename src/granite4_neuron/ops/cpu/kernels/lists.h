// An operator's lists of weights, read in their order into what blocks take.
#pragma once

#include "layers.h"

namespace granite4_neuron {

// Weights that are no matrices.
class WeightList {
 public:
  using List = c10::List<std::optional<at::Tensor>>;

  explicit WeightList(const List& list) : list_(list) {}

  std::optional<at::Tensor> next_if_any() {
    TORCH_CHECK(next_ < list_.size(), "there are only ", list_.size(), " weights");
    return list_.get(next_++);
  }
  at::Tensor next() {
    std::optional<at::Tensor> weight = next_if_any();
    TORCH_CHECK(weight.has_value(), "weight ", next_ - 1, " is None");
    return *weight;
  }
  MixerWeights mixer() {
    return {next(), next_if_any(), next(), next(), next()};
  }

 private:
  const List& list_;
  size_t next_ = 0;
};

// Packed matrices.
class Matrices {
 public:
  explicit Matrices(at::TensorList list) : list_(list) {}

  Weight next() {
    TORCH_CHECK(next_ < list_.size(), "there are only ", list_.size(), " matrices");
    return weight_in(list_[next_++]);
  }

 private:
  at::TensorList list_;
  size_t next_ = 0;
};

// Matrices: in_proj, out_proj. Weights: norm, bias of in_proj, mixer, gated_norm, bias of out_proj.
inline MambaBlockWeights mamba_weights(Matrices& matrices, WeightList& weights) {
  at::Tensor norm = weights.next();
  Linear in_proj{matrices.next(), weights.next_if_any()};
  MixerWeights mixer = weights.mixer();
  at::Tensor gated_norm = weights.next();
  return {norm, in_proj, mixer, gated_norm, {matrices.next(), weights.next_if_any()}};
}

// Matrices: projections of queries, keys, values and output. Weights: norm, their biases.
inline AttentionBlockWeights attention_weights(Matrices& matrices, WeightList& weights) {
  at::Tensor norm = weights.next();
  auto projection = [&] { return Linear{matrices.next(), weights.next_if_any()}; };
  Linear query = projection(), key = projection(), value = projection();
  return {norm, query, key, value, projection()};
}

// Matrices: input and output of the MLP; with experts router, input and output of these.
inline FeedForwardWeights feed_forward_weights(Matrices& matrices, const at::Tensor& norm, bool has_experts) {
  Weight input = matrices.next(), output = matrices.next();
  if (!has_experts) return {norm, input, output, std::nullopt};
  Weight router = matrices.next(), of_experts = matrices.next();
  return {norm, input, output, ExpertWeights{router, of_experts, matrices.next()}};
}

}  // namespace granite4_neuron
