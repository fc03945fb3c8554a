// The kernels as operators of torch, torch.ops.granite4_neuron.*; ops/cpu/__init__.py is their Python side.
#include <torch/library.h>

#include "attention.h"
#include "experts.h"
#include "layers.h"
#include "linear.h"
#include "mamba.h"
#include "norm.h"

TORCH_LIBRARY(granite4_neuron, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? scale) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor? z, Tensor weight, float eps, int n_groups) -> Tensor");
  library.def("silu_and_mul(Tensor x) -> Tensor");
  library.def("residual_add(Tensor x, Tensor y, float alpha) -> Tensor");
  library.def(
      "mlp(Tensor x, Tensor input_weight, Tensor output_weight, Tensor? input_scale, Tensor? output_scale) -> Tensor");
  library.def("logits(Tensor x, Tensor weight, float scaling, Tensor? scale) -> Tensor");
  library.def("few_rows() -> int", [] { return granite4_neuron::FEW; });
  library.def(
      "mamba_mixer(Tensor projected, Tensor conv_taps, Tensor? conv_bias, Tensor dt_bias, Tensor A, Tensor D, "
      "Tensor(a!) conv_state, Tensor(b!) ssm_state, Tensor lengths, Tensor read_slots, Tensor slots, int n_groups, "
      "float dt_low, float dt_high, int chunk_size, int heads_per_task) -> Tensor");
  library.def(
      "mamba_block(Tensor norm_weight, Tensor in_proj_weight, Tensor? in_proj_bias, Tensor? in_proj_scale, "
      "Tensor conv_taps, Tensor? conv_bias, Tensor dt_bias, Tensor A, Tensor D, Tensor gated_norm_weight, "
      "Tensor out_proj_weight, Tensor? out_proj_bias, Tensor? out_proj_scale, int n_groups, float dt_low, "
      "float dt_high, float eps, float residual_multiplier, Tensor hidden_states, Tensor(a!) conv_state, "
      "Tensor(b!) ssm_state, Tensor lengths, Tensor read_slots, Tensor slots, int chunk_size, int heads_per_task) -> Tensor");
  library.def(
      "feed_forward_block(Tensor norm_weight, Tensor input_weight, Tensor output_weight, Tensor? input_scale, "
      "Tensor? output_scale, Tensor? router_weight, int top_k, Tensor? w1, Tensor? w2, Tensor? w1_scale, "
      "Tensor? w2_scale, float eps, float residual_multiplier, Tensor hidden_states) -> Tensor");
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
  library.impl("linear", &granite4_neuron::linear);
  library.impl("rms_norm", &granite4_neuron::rms_norm);
  library.impl("silu_and_mul", static_cast<at::Tensor (*)(const at::Tensor&)>(&granite4_neuron::silu_and_mul));
  library.impl("residual_add", &granite4_neuron::residual_add);
  library.impl("mlp", &granite4_neuron::mlp);
  library.impl("logits", &granite4_neuron::logits);
  library.impl("mamba_block", &granite4_neuron::mamba_block);
  library.impl("feed_forward_block", &granite4_neuron::feed_forward_block);
  library.impl("mamba_mixer", &granite4_neuron::mamba_mixer);
  library.impl("write_cache", &granite4_neuron::write_cache);
  library.impl("decode_attention", &granite4_neuron::decode_attention);
  library.impl("prefill_attention", &granite4_neuron::prefill_attention);
  library.impl("fused_experts", &granite4_neuron::fused_experts);
}
