// The kernels for Python: functions as torch.ops.granite4_neuron.*, layers as torch.classes.granite4_neuron.*. devices/cpu is
// their Python side, and README.md introduces them.
#include <torch/custom_class.h>
#include <torch/library.h>

#include "attention.h"
#include "decoder.h"
#include "experts.h"
#include "layers.h"
#include "linear.h"
#include "norm.h"
#include "packing.h"
#include "profile.h"
#include "sampling.h"

namespace granite4_neuron {

using c10::intrusive_ptr;
using at::Tensor;
using MaybeTensor = std::optional<at::Tensor>;

inline std::optional<RotaryTables> rotary(const MaybeTensor& cos, const MaybeTensor& sin) {
  TORCH_CHECK(cos.has_value() == sin.has_value(), "cos and sin must be given together");
  if (!cos.has_value()) return std::nullopt;
  return RotaryTables{*cos, *sin};
}

// adapt(adapter, projection, down, up) of a layer, see devices/cpu/layers.py.
template <typename Layer>
inline void register_adapt(torch::class_<Layer>& layer) {
  using torch::arg;
  layer.def(
      "adapt",
      [](const intrusive_ptr<Layer>& self, int64_t adapter, std::string projection, const Tensor& down,
         const Tensor& up) { self->adapt(adapter, projection, LowRank(down, up)); },
      "", {arg("adapter"), arg("projection"), arg("down"), arg("up")});
}

inline void register_layers(torch::Library& library) {
  using torch::arg;
  using torch::init;

  library.class_<MixerObject>("MambaMixer")
      .def(
          init([](const Tensor& conv_weight, const MaybeTensor& conv_bias, const Tensor& dt_bias, const Tensor& A_log,
                  const Tensor& D, int64_t n_groups, double dt_min, double dt_max, int64_t chunk_size,
                  int64_t heads_per_task, int64_t seed, int64_t stream, int64_t rounds) {
            Rounding rounding{static_cast<uint64_t>(seed), static_cast<uint32_t>(stream), rounds};
            MixerSettings settings{n_groups, chunk_size, heads_per_task, static_cast<float>(dt_min),
                                   static_cast<float>(dt_max), rounding};
            return c10::make_intrusive<MixerObject>(
                MixerWeights{conv_weight, conv_bias, dt_bias, A_log, D}, settings);
          }),
          "",
          {arg("conv_weight"), arg("conv_bias"), arg("dt_bias"), arg("A_log"), arg("D"), arg("n_groups"),
           arg("dt_min"), arg("dt_max"), arg("chunk_size"), arg("heads_per_task"), arg("seed"), arg("stream"),
           arg("rounds")})
      .def(
          "step",
          [](const intrusive_ptr<MixerObject>& self, const Tensor& projected, const Tensor& conv_state,
             const Tensor& ssm_state, const Tensor& offsets, const Tensor& lengths, const Tensor& read_slots,
             const Tensor& write_slots, const Tensor& starts) {
            SlotRows rows{{offsets, lengths}, read_slots, write_slots, starts};
            return mamba_mixer(*self, projected, {conv_state, ssm_state}, rows);
          },
          "",
          {arg("projected"), arg("conv_state"), arg("ssm_state"), arg("offsets"), arg("lengths"), arg("read_slots"),
           arg("write_slots"), arg("starts")})
      .def(
          "step_paged",
          [](const intrusive_ptr<MixerObject>& self, const Tensor& projected, const Tensor& conv_state,
             const Tensor& ssm_state, const Tensor& starts, const Tensor& pages, const MaybeTensor& accepted) {
            return paged_mamba_mixer(*self, projected, {conv_state, ssm_state}, {starts, pages, accepted});
          },
          "",
          {arg("projected"), arg("conv_state"), arg("ssm_state"), arg("starts"), arg("pages"), arg("accepted")});

  auto mambaLayer = library.class_<MambaLayer>("MambaLayer");
  register_adapt(mambaLayer);
  mambaLayer
      .def(
          init([](const intrusive_ptr<MixerObject>& mixer, const Tensor& norm, const Tensor& in_proj,
                  const MaybeTensor& in_bias, const Tensor& gated_norm, const Tensor& out_proj,
                  const MaybeTensor& out_bias, double eps, double residual_multiplier) {
            return c10::make_intrusive<MambaLayer>(
                Residual(norm, eps, residual_multiplier), Linear(in_proj, in_bias), mixer, gated_norm,
                Linear(out_proj, out_bias));
          }),
          "",
          {arg("mixer"), arg("norm"), arg("in_proj"), arg("in_bias"), arg("gated_norm"), arg("out_proj"),
           arg("out_bias"), arg("eps"), arg("residual_multiplier")})
      .def(
          "step_paged",
          [](const intrusive_ptr<MambaLayer>& self, const Tensor& hidden_states, const Tensor& conv_state,
             const Tensor& ssm_state, const Tensor& starts, const Tensor& pages, const MaybeTensor& accepted) {
            return self->step_paged(hidden_states, {conv_state, ssm_state}, {starts, pages, accepted});
          },
          "",
          {arg("hidden_states"), arg("conv_state"), arg("ssm_state"), arg("starts"), arg("pages"), arg("accepted")})
      .def(
          "project",
          [](const intrusive_ptr<MambaLayer>& self, const Tensor& hidden_states) {
            Tensor projected = self->project(hidden_states);
            return std::make_tuple(projected, self->mixer_inputs(projected));
          },
          "", {arg("hidden_states")})
      .def(
          "finish",
          [](const intrusive_ptr<MambaLayer>& self, const Tensor& hidden_states, const Tensor& projected,
             const Tensor& y) { return self->finish(hidden_states, projected, y); },
          "", {arg("hidden_states"), arg("projected"), arg("y")});

  auto attentionLayer = library.class_<AttentionLayer>("AttentionLayer");
  register_adapt(attentionLayer);
  attentionLayer
      .def(
          init([](const Tensor& norm, const Tensor& q_proj, const MaybeTensor& q_bias, const Tensor& k_proj,
                  const MaybeTensor& k_bias, const Tensor& v_proj, const MaybeTensor& v_bias, const Tensor& o_proj,
                  const MaybeTensor& o_bias, int64_t head_dim, double scale, double eps, double residual_multiplier) {
            return c10::make_intrusive<AttentionLayer>(
                Residual(norm, eps, residual_multiplier), Linear(q_proj, q_bias), Linear(k_proj, k_bias),
                Linear(v_proj, v_bias), Linear(o_proj, o_bias), head_dim, scale);
          }),
          "",
          {arg("norm"), arg("q_proj"), arg("q_bias"), arg("k_proj"), arg("k_bias"), arg("v_proj"), arg("v_bias"),
           arg("o_proj"), arg("o_bias"), arg("head_dim"), arg("scale"), arg("eps"), arg("residual_multiplier")})
      .def(
          "step_paged",
          [](const intrusive_ptr<AttentionLayer>& self, const Tensor& hidden_states, const Tensor& key_pages,
             const Tensor& value_pages, const Tensor& starts, const Tensor& lengths, const Tensor& pages,
             const MaybeTensor& cos, const MaybeTensor& sin) {
            return self->step_paged(
                hidden_states, {key_pages, value_pages}, {starts, lengths, pages}, rotary(cos, sin));
          },
          "",
          {arg("hidden_states"), arg("key_pages"), arg("value_pages"), arg("starts"), arg("lengths"), arg("pages"),
           arg("cos"), arg("sin")});

  auto feedForward = library.class_<FeedForward>("FeedForward");
  register_adapt(feedForward);
  feedForward
      .def(
          init([](const Tensor& norm, const Tensor& input, const Tensor& output, const MaybeTensor& router,
                  const MaybeTensor& expert_input, const MaybeTensor& expert_output, int64_t top_k, double eps,
                  double residual_multiplier, const MaybeTensor& correction_bias, int64_t n_group, int64_t topk_group,
                  bool norm_topk_prob, double scaling_factor, const MaybeTensor& latent_input,
                  const MaybeTensor& latent_output) {
            std::optional<Experts> experts;
            if (router.has_value()) {
              TORCH_CHECK(expert_input.has_value() && expert_output.has_value(), "there is a router without experts");
              experts = Experts{Matrix(*router), ExpertLinear(*expert_input), ExpertLinear(*expert_output), top_k};
              if (correction_bias.has_value())
                experts->sigmoid =
                    SigmoidChoice{*correction_bias, n_group, topk_group, norm_topk_prob, scaling_factor};
              TORCH_CHECK(
                  latent_input.has_value() == latent_output.has_value(), "one latent projection is there, one is not");
              if (latent_input.has_value()) {
                experts->latent_input.emplace(*latent_input);
                experts->latent_output.emplace(*latent_output);
              }
            }
            return c10::make_intrusive<FeedForward>(
                Residual(norm, eps, residual_multiplier), Linear(input), Linear(output), experts);
          }),
          "",
          {arg("norm"), arg("input"), arg("output"), arg("router"), arg("expert_input"), arg("expert_output"),
           arg("top_k"), arg("eps"), arg("residual_multiplier"), arg("correction_bias"), arg("n_group"),
           arg("topk_group"), arg("norm_topk_prob"), arg("scaling_factor"), arg("latent_input"),
           arg("latent_output")})
      .def(
          "step",
          [](const intrusive_ptr<FeedForward>& self, const Tensor& hidden_states) {
            return self->step(hidden_states);
          },
          "", {arg("hidden_states")});

  library.class_<Decoder>("Decoder")
      .def(init<>())
      .def("append_mamba", &Decoder::append_mamba, "", {arg("half")})
      .def("append_attention", &Decoder::append_attention, "", {arg("half")})
      .def("append_feed_forward", &Decoder::append_feed_forward, "", {arg("half")})
      .def(
          "step",
          [](const intrusive_ptr<Decoder>& self, const Tensor& hidden_states, LayerStates states,
             const Tensor& offsets, const Tensor& lengths, const Tensor& read_slots, const Tensor& write_slots,
             const Tensor& starts, const Tensor& slots, const MaybeTensor& adapters, const MaybeTensor& cos,
             const MaybeTensor& sin, bool keep_inputs) {
            SlotRows rows{{offsets, lengths}, read_slots, write_slots, starts};
            return self->step(hidden_states, states, rows, slots, adapters, rotary(cos, sin), keep_inputs);
          },
          "",
          {arg("hidden_states"), arg("states"), arg("offsets"), arg("lengths"), arg("read_slots"),
           arg("write_slots"), arg("starts"), arg("slots"), arg("adapters"), arg("cos"), arg("sin"),
           arg("keep_inputs")})
      .def(
          "set_embedding_and_head",
          [](const intrusive_ptr<Decoder>& self, const Tensor& head, const MaybeTensor& embedding,
             double embedding_multiplier, const Tensor& norm, double eps, double logits_scaling) {
            self->set_embedding_and_head({Matrix(head), embedding, embedding_multiplier, norm, eps, logits_scaling});
          },
          "",
          {arg("head"), arg("embedding"), arg("embedding_multiplier"), arg("norm"), arg("eps"),
           arg("logits_scaling")})
      .def(
          "forward_packed",
          [](const intrusive_ptr<Decoder>& self, const Tensor& tokens, std::vector<int64_t> starts,
             std::vector<int64_t> lengths, std::vector<int64_t> slots, LayerStates states) {
            return self->forward_packed(tokens, starts, lengths, slots, states);
          },
          "", {arg("tokens"), arg("starts"), arg("lengths"), arg("slots"), arg("states")})
      .def(
          "advance",
          [](const intrusive_ptr<Decoder>& self, std::vector<Tensor> kept_inputs, LayerStates states,
             const Tensor& offsets, const Tensor& lengths, const Tensor& read_slots, const Tensor& write_slots,
             const Tensor& starts) {
            self->advance(kept_inputs, states, {{offsets, lengths}, read_slots, write_slots, starts});
          },
          "",
          {arg("kept_inputs"), arg("states"), arg("offsets"), arg("lengths"), arg("read_slots"),
           arg("write_slots"), arg("starts")});
}

// `Profile.take`, by the names of parts.
inline std::tuple<std::vector<std::string>, std::vector<double>, std::vector<double>> profile(bool on) {
  std::vector<double> seconds, busy_seconds;
  for (const auto& times : Profile::instance().take(on)) {
    seconds.push_back(times.seconds);
    busy_seconds.push_back(times.busy_seconds);
  }
  return {{Profile::NAMES.begin(), Profile::NAMES.end()}, seconds, busy_seconds};
}

}  // namespace granite4_neuron

// Matrices are tensors of bytes, see `weight_in`.
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
  library.def("write_cache(Tensor(a!) cache, Tensor values, Tensor positions, Tensor lengths, Tensor slots) -> ()");
  library.def(
      "cached_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor positions, Tensor lengths, "
      "Tensor slots, float scale) -> Tensor");
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_pages, Tensor(b!) value_pages, "
      "Tensor starts, Tensor lengths, Tensor pages, float scale) -> Tensor");
  library.def(
      "fused_experts(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids) "
      "-> Tensor");
  library.def(
      "choose(Tensor[] logits, float[] reals, int[] wholes, Tensor[] masks, Tensor tokens, Tensor values, "
      "int[] offsets, int num_top) -> (int[] chosen, Tensor logprobs, Tensor about)");
  library.def("token_logprobs(Tensor logits, int[] tokens, int num_top) -> (Tensor logprobs, Tensor about)");
  library.def("profile(bool on) -> (str[] parts, float[] seconds, float[] busy_seconds)", &granite4_neuron::profile);
  granite4_neuron::register_layers(library);
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
  library.impl("write_cache", &granite4_neuron::write_cache);
  library.impl("cached_attention", &granite4_neuron::cached_attention);
  library.impl(
      "paged_attention",
      [](const Tensor& query, const Tensor& key, const Tensor& value, Tensor key_pages, Tensor value_pages,
         const Tensor& starts, const Tensor& lengths, const Tensor& pages, double scale) {
        return granite4_neuron::paged_attention(
            query, key, value, key_pages, value_pages, {starts, lengths, pages}, scale);
      });
  library.impl("choose", &granite4_neuron::choose);
  library.impl("token_logprobs", &granite4_neuron::token_logprobs);
  library.impl(
      "fused_experts",
      [](const Tensor& hidden_states, const Tensor& w1, const Tensor& w2, const Tensor& topk_weights,
         const Tensor& topk_ids) {
        return granite4_neuron::fused_experts(hidden_states, weight_in(w1), weight_in(w2), topk_weights, topk_ids);
      });
}
