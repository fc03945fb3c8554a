// The kernels as operators of torch, torch.ops.granite4_neuron.*; ops/cpu is their Python side, README.md the way in.
#include <torch/library.h>

#include "attention.h"
#include "experts.h"
#include "layers.h"
#include "linear.h"
#include "mamba.h"
#include "norm.h"
#include "paged.h"

namespace granite4_neuron {

// An operator's list of weights, read in its order.
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
  LinearWeights linear() {
    return {next(), next_if_any(), next_if_any()};
  }
  LinearWeights linear_without_bias() {
    return {next(), std::nullopt, next_if_any()};
  }
  MixerWeights mixer() {
    return {next(), next_if_any(), next(), next(), next()};
  }
  bool is_at_end() const {
    return next_ == list_.size();
  }

 private:
  const List& list_;
  size_t next_ = 0;
};

// sizes: groups, chunk_size, heads_per_task. limits: dt_low, dt_high. rounding: seed, stream, rounds.
inline MixerSettings settings(at::IntArrayRef sizes, at::ArrayRef<double> limits, at::IntArrayRef rounding) {
  TORCH_CHECK(sizes.size() == 3 && limits.size() == 2 && rounding.size() == 3);
  return {sizes[0], sizes[1], sizes[2], static_cast<float>(limits[0]), static_cast<float>(limits[1]),
          {static_cast<uint64_t>(rounding[0]), static_cast<uint32_t>(rounding[1]), rounding[2]}};
}

at::Tensor mamba_mixer_operator(
    const at::Tensor& projected, const WeightList::List& weights, at::Tensor conv_state, at::Tensor ssm_state,
    at::TensorList rows, at::IntArrayRef sizes, at::ArrayRef<double> limits, at::IntArrayRef rounding) {
  MixerState state{conv_state, ssm_state};
  return mamba_mixer(projected, WeightList(weights).mixer(), state, rows, settings(sizes, limits, rounding));
}

at::Tensor paged_mamba_mixer_operator(
    const at::Tensor& projected, const WeightList::List& weights, at::Tensor conv_state, at::Tensor ssm_state,
    at::TensorList rows, at::IntArrayRef sizes, at::ArrayRef<double> limits) {
  MixerState state{conv_state, ssm_state};
  return paged_mamba_mixer(
      projected, WeightList(weights).mixer(), state, rows, settings(sizes, limits, {0, 0, 0}));
}

std::tuple<at::Tensor, at::Tensor> mamba_block_operator(
    const at::Tensor& hidden_states, const WeightList::List& list, at::Tensor conv_state, at::Tensor ssm_state,
    at::TensorList rows, at::IntArrayRef sizes, at::ArrayRef<double> constants, at::IntArrayRef rounding) {
  TORCH_CHECK(constants.size() == 4);
  WeightList of(list);
  MambaBlockWeights weights{of.next(), of.linear(), of.mixer(), of.next(), of.linear()};
  return mamba_block(
      hidden_states, weights, {conv_state, ssm_state}, rows, settings(sizes, constants.slice(0, 2), rounding),
      {constants[2], constants[3]});
}

at::Tensor feed_forward_block_operator(
    const at::Tensor& hidden_states, const WeightList::List& list, int64_t top_k, double eps,
    double residual_multiplier) {
  WeightList of(list);
  FeedForwardWeights weights{of.next(), of.linear_without_bias(), of.linear_without_bias(), std::nullopt};
  if (!of.is_at_end()) weights.experts = {of.next(), of.linear_without_bias(), of.linear_without_bias()};
  return feed_forward_block(hidden_states, weights, top_k, {eps, residual_multiplier});
}

}  // namespace granite4_neuron

// Weights of the mixer: conv_weight, conv_bias, dt_bias, A_log, D. Of a projection: weight, bias, scale; of an MLP's
// or the experts' without the bias. mamba_block: norm, in_proj, mixer, gated_norm, out_proj. feed_forward_block: norm,
// input, output, and with experts router, input, output.
TORCH_LIBRARY(granite4_neuron, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? scale) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor? z, Tensor weight, float eps, int n_groups) -> Tensor");
  library.def("silu_and_mul(Tensor x) -> Tensor");
  library.def("residual_add(Tensor x, Tensor y, float alpha) -> Tensor");
  library.def(
      "mlp(Tensor x, Tensor input_weight, Tensor output_weight, Tensor? input_scale, Tensor? output_scale) -> Tensor");
  library.def("logits(Tensor x, Tensor weight, float scaling, Tensor? scale) -> Tensor");
  library.def("few_rows() -> int", [] { return granite4_neuron::FEW; });
  // rows: lengths, read_slots, write_slots, starts. sizes: n_groups, chunk_size, heads_per_task. limits: dt_min, dt_max.
  // rounding: seed, stream, rounds.
  library.def(
      "mamba_mixer(Tensor projected, Tensor?[] weights, Tensor(a!) conv_state, Tensor(b!) ssm_state, Tensor[] rows, "
      "int[] sizes, float[] limits, int[] rounding) -> Tensor");
  // rows: starts, pages, accepted where the step is speculative.
  library.def(
      "paged_mamba_mixer(Tensor projected, Tensor?[] weights, Tensor(a!) conv_state, Tensor(b!) ssm_state, "
      "Tensor[] rows, int[] sizes, float[] limits) -> Tensor");
  // constants: dt_min, dt_max, eps, residual_multiplier.
  library.def(
      "mamba_block(Tensor hidden_states, Tensor?[] weights, Tensor(a!) conv_state, Tensor(b!) ssm_state, "
      "Tensor[] rows, int[] sizes, float[] constants, int[] rounding) -> (Tensor, Tensor)");
  library.def(
      "feed_forward_block(Tensor hidden_states, Tensor?[] weights, int top_k, float eps, float residual_multiplier) "
      "-> Tensor");
  library.def("write_cache(Tensor(a!) cache, Tensor values, Tensor positions, Tensor lengths, Tensor slots) -> ()");
  library.def(
      "decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor positions, Tensor lengths, "
      "Tensor slots, float scale) -> Tensor");
  library.def(
      "prefill_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor positions, Tensor lengths, "
      "Tensor slots, float scale) -> Tensor");
  library.def(
      "fused_experts(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
      "Tensor? w1_scale, Tensor? w2_scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(granite4_neuron, CPU, library) {
  using at::Tensor;
  using Optional = std::optional<Tensor>;
  using Linear = Tensor (*)(const Tensor&, const Tensor&, const Optional&, const Optional&);
  library.impl("linear", static_cast<Linear>(&granite4_neuron::linear));
  library.impl("rms_norm", &granite4_neuron::rms_norm);
  library.impl("silu_and_mul", static_cast<Tensor (*)(const Tensor&)>(&granite4_neuron::silu_and_mul));
  library.impl("residual_add", &granite4_neuron::residual_add);
  library.impl("mlp", &granite4_neuron::mlp);
  library.impl("logits", &granite4_neuron::logits);
  library.impl("mamba_mixer", &granite4_neuron::mamba_mixer_operator);
  library.impl("paged_mamba_mixer", &granite4_neuron::paged_mamba_mixer_operator);
  library.impl("mamba_block", &granite4_neuron::mamba_block_operator);
  library.impl("feed_forward_block", &granite4_neuron::feed_forward_block_operator);
  library.impl("write_cache", &granite4_neuron::write_cache);
  library.impl("decode_attention", &granite4_neuron::decode_attention);
  library.impl("prefill_attention", &granite4_neuron::prefill_attention);
  library.impl("fused_experts", &granite4_neuron::fused_experts);
}
