// The kernels as operators of torch, torch.ops.granite4_neuron.*; ops/cpu is their Python side, README.md the way in.
#include <torch/library.h>

#include "attention.h"
#include "decoder.h"
#include "experts.h"
#include "layers.h"
#include "linear.h"
#include "lists.h"
#include "mamba.h"
#include "norm.h"
#include "paged.h"
#include "paged_attention.h"
#include "quantize.h"

namespace granite4_neuron {

// sizes: groups, chunk_size, heads_per_task. limits: dt_low, dt_high. rounding: seed, stream, rounds.
inline MixerSettings settings(at::IntArrayRef sizes, at::ArrayRef<double> limits, at::IntArrayRef rounding) {
  TORCH_CHECK(
      sizes.size() == 3 && limits.size() == 2 && rounding.size() == 3, "there are ", sizes.size(), " sizes, ",
      limits.size(), " limits and ", rounding.size(), " numbers about rounding");
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

// sizes: groups, chunk_size, heads_per_task, top_k, seed, rounds. constants: dt_low, dt_high, eps,
// residual_multiplier, attention_scale.
std::vector<at::Tensor> decoder_layers_operator(
    const at::Tensor& hidden_states, at::TensorList matrices, const WeightList::List& list, at::TensorList states,
    at::TensorList rows, at::IntArrayRef sizes, at::ArrayRef<double> constants, bool keep_inputs) {
  TORCH_CHECK(
      sizes.size() == 6 && constants.size() == 5, "there are ", sizes.size(), " sizes and ", constants.size(),
      " constants");
  DecoderSettings settings{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                           constants[0], constants[1], constants[2], constants[3], constants[4]};
  return decoder_layers(
      hidden_states, Matrices(matrices), WeightList(list), states, rows, settings, keep_inputs);
}

at::Tensor paged_mamba_block_operator(
    const at::Tensor& hidden_states, at::TensorList matrices, const WeightList::List& list,
    at::TensorList states, at::TensorList rows, at::IntArrayRef sizes, at::ArrayRef<double> constants) {
  TORCH_CHECK(
      states.size() == 2 && constants.size() == 4, "there are ", states.size(), " states and ", constants.size(),
      " constants");
  Matrices of_matrices(matrices);
  WeightList weights(list);
  auto [result, inputs] = mamba_block(
      paged_mamba_mixer, hidden_states, mamba_weights(of_matrices, weights), {states[0], states[1]}, rows,
      settings(sizes, constants.slice(0, 2), {0, 0, 0}), {constants[2], constants[3]});
  return result;
}

at::Tensor feed_forward_block_operator(
    const at::Tensor& hidden_states, at::TensorList matrices, const at::Tensor& norm, int64_t top_k, double eps,
    double residual_multiplier) {
  Matrices of_matrices(matrices);
  FeedForwardWeights weights = feed_forward_weights(of_matrices, norm, top_k > 0);
  return feed_forward_block(hidden_states, weights, top_k, {eps, residual_multiplier});
}

}  // namespace granite4_neuron

// Weights of the mixer: conv_weight, conv_bias, dt_bias, A_log, D; of blocks: see lists.h. Matrices are tensors of
// bytes, see `weight_in`.
TORCH_LIBRARY(granite4_neuron, library) {
  library.def("quantize(Tensor weight, str format, Tensor(a!) values, Tensor(b!) scales) -> ()");
  library.def(
      "pack(Tensor values, Tensor? scales, str format, ScalarType dtype, int[] shape, Tensor(a!) bytes) -> ()");
  library.def("packed_bytes(int[] shape, str format, ScalarType dtype) -> int", &granite4_neuron::packed_bytes);
  library.def("weight_rows(Tensor weight, Tensor ids) -> Tensor");
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor? z, Tensor weight, float eps, int n_groups) -> Tensor");
  library.def("silu_and_mul(Tensor x) -> Tensor");
  library.def("residual_add(Tensor x, Tensor y, float alpha) -> Tensor");
  library.def("mlp(Tensor x, Tensor input_weight, Tensor output_weight) -> Tensor");
  library.def("logits(Tensor x, Tensor weight, float scaling) -> Tensor");
  // rows: lengths, read_slots, write_slots, starts. sizes: n_groups, chunk_size, heads_per_task. limits: dt_min,
  // dt_max. rounding: seed, stream, rounds.
  library.def(
      "mamba_mixer(Tensor projected, Tensor?[] weights, Tensor(a!) conv_state, Tensor(b!) ssm_state, Tensor[] rows, "
      "int[] sizes, float[] limits, int[] rounding) -> Tensor");
  // rows: starts, pages, accepted where the step is speculative.
  library.def(
      "paged_mamba_mixer(Tensor projected, Tensor?[] weights, Tensor(a!) conv_state, Tensor(b!) ssm_state, "
      "Tensor[] rows, int[] sizes, float[] limits) -> Tensor");
  // See `decoder_layers`, and the operator above for sizes and constants. States are advanced in place.
  library.def(
      "decoder_layers(Tensor hidden_states, Tensor[] matrices, Tensor?[] weights, Tensor(a!)[] states, Tensor[] rows, "
      "int[] sizes, float[] constants, bool keep_inputs) -> Tensor[]");
  // states: conv_state, ssm_state, which are advanced in place. constants: dt_min, dt_max, eps, residual_multiplier.
  library.def(
      "paged_mamba_block(Tensor hidden_states, Tensor[] matrices, Tensor?[] weights, Tensor(a!)[] states, "
      "Tensor[] rows, int[] sizes, float[] constants) -> Tensor");
  library.def(
      "feed_forward_block(Tensor hidden_states, Tensor[] matrices, Tensor norm, int top_k, float eps, "
      "float residual_multiplier) -> Tensor");
  library.def("write_cache(Tensor(a!) cache, Tensor values, Tensor positions, Tensor lengths, Tensor slots) -> ()");
  library.def(
      "cached_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor positions, Tensor lengths, "
      "Tensor slots, float scale) -> Tensor");
  // rows: starts, lengths, pages.
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_pages, Tensor(b!) value_pages, "
      "Tensor[] rows, float scale) -> Tensor");
  library.def(
      "fused_experts(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(granite4_neuron, CPU, library) {
  using at::Tensor;
  using granite4_neuron::weight_in;
  library.impl("quantize", &granite4_neuron::quantize);
  library.impl("pack", &granite4_neuron::pack);
  library.impl("weight_rows", [](const Tensor& weight, const Tensor& ids) {
    return granite4_neuron::weight_rows(weight_in(weight), ids);
  });
  library.impl("linear", [](const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
    return granite4_neuron::linear(x, weight_in(weight), bias);
  });
  library.impl("rms_norm", &granite4_neuron::rms_norm);
  library.impl("silu_and_mul", static_cast<Tensor (*)(const Tensor&)>(&granite4_neuron::silu_and_mul));
  library.impl("residual_add", &granite4_neuron::residual_add);
  library.impl("mlp", [](const Tensor& x, const Tensor& input_weight, const Tensor& output_weight) {
    return granite4_neuron::mlp(x, weight_in(input_weight), weight_in(output_weight));
  });
  library.impl("logits", [](const Tensor& x, const Tensor& weight, double scaling) {
    return granite4_neuron::logits(x, weight_in(weight), scaling);
  });
  library.impl("mamba_mixer", &granite4_neuron::mamba_mixer_operator);
  library.impl("paged_mamba_mixer", &granite4_neuron::paged_mamba_mixer_operator);
  library.impl("decoder_layers", &granite4_neuron::decoder_layers_operator);
  library.impl("paged_mamba_block", &granite4_neuron::paged_mamba_block_operator);
  library.impl("feed_forward_block", &granite4_neuron::feed_forward_block_operator);
  library.impl("write_cache", &granite4_neuron::write_cache);
  library.impl("cached_attention", &granite4_neuron::cached_attention);
  library.impl("paged_attention", &granite4_neuron::paged_attention);
  library.impl(
      "fused_experts",
      [](const Tensor& hidden_states, const Tensor& w1, const Tensor& w2, const Tensor& topk_weights,
         const Tensor& topk_ids) {
        return granite4_neuron::fused_experts(hidden_states, weight_in(w1), weight_in(w2), topk_weights, topk_ids);
      });
}
