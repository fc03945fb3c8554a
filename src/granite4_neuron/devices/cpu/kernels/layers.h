// The halves of decoder layers, each made once from its weights and settings.
//
// The definitions are in Python: model.mamba2.Mamba2 and model.attention.Attention, each after a norm, and the second
// half of model.decoder_layer.DecoderLayer. devices/cpu/layers.py is the Python side.
#pragma once

#include <torch/custom_class.h>

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "mamba.h"
#include "norm.h"
#include "rotary.h"

namespace granite4_neuron {

// A projection.
struct Linear {
  Matrix matrix;
  std::optional<at::Tensor> bias;  // [rows]
  Additions additions;

  explicit Linear(const at::Tensor& packed, const std::optional<at::Tensor>& bias = std::nullopt)
      : matrix(packed), bias(bias) {
    check_matrix(matrix.weight);
    check_bias(matrix.weight, bias);
  }
  int64_t rows() const {
    return matrix.weight.rows;
  }
  at::Tensor operator()(const at::Tensor& x, const AdapterRows& adapters) const {
    at::Tensor y = linear(x, matrix.weight, bias);
    additions.add(x, y, adapters);
    return y;
  }
};

// A projection of each expert.
struct ExpertLinear {
  Matrix matrix;
  Additions additions;

  explicit ExpertLinear(const at::Tensor& packed) : matrix(packed) {}
};

// A projection that adapters may be added to.
struct Adaptable {
  Additions* additions;
  const Weight* weight;

  template <typename Projection>
  Adaptable(Projection& projection) : additions(&projection.additions), weight(&projection.matrix.weight) {}
};

// Adds an adapter to one of a layer's projections.
inline void adapt(
    const std::map<std::string, Adaptable>& projections, const std::string& name, int64_t adapter,
    const LowRank& addition) {
  auto found = projections.find(name);
  TORCH_CHECK(found != projections.end(), "there is no projection ", name);
  found->second.additions->append(adapter, addition, *found->second.weight);
}

// Checks that a matrix has this shape and is for vectors in the norm's dtype.
inline void check_projection(
    const Matrix& matrix, const char* name, const at::Tensor& norm, int64_t rows, int64_t columns) {
  const Weight& weight = matrix.weight;
  TORCH_CHECK(
      weight.dtype == norm.scalar_type(), name, " is for vectors of ", weight.dtype, ", and the norm is ",
      norm.scalar_type());
  TORCH_CHECK(
      weight.rows == rows && weight.columns == columns, name, " is [", weight.rows, ", ", weight.columns,
      "] and should be [", rows, ", ", columns, "]");
}

// The common part of all halves: each computes a term from the normalised residual stream and adds a multiple of it.
struct Residual {
  at::Tensor norm;  // [hidden_size]
  double eps, multiplier;

  Residual(const at::Tensor& norm, double eps, double multiplier) : norm(norm), eps(eps), multiplier(multiplier) {
    check_dense(norm, "norm", {norm.numel()}, norm.scalar_type());
  }
  int64_t hidden_size() const {
    return norm.numel();
  }
  // hidden_states: [..., hidden_size], float32.
  at::Tensor normalised(const at::Tensor& hidden_states) const {
    return rms_norm(hidden_states, std::nullopt, norm, eps, 1);
  }
  at::Tensor add(const at::Tensor& hidden_states, const at::Tensor& output) const {
    return residual_add(hidden_states, output, multiplier);
  }
};

// `MambaMixer` as an object of torch.
struct MixerObject : torch::CustomClassHolder, MambaMixer {
  using MambaMixer::MambaMixer;
};

// hidden_states + multiplier * out_proj(rms_norm_gated(y, z)), where y = mixer(xBC, dt) and (z, xBC, dt) =
// in_proj(rms_norm(hidden_states)).
struct MambaLayer : torch::CustomClassHolder {
  const Residual residual;
  Linear in_proj, out_proj;
  const c10::intrusive_ptr<MixerObject> mixer;
  const at::Tensor gated_norm;  // [inner]

  MambaLayer(
      const Residual& residual, const Linear& in_proj, const c10::intrusive_ptr<MixerObject>& mixer,
      const at::Tensor& gated_norm, const Linear& out_proj)
      : residual(residual), in_proj(in_proj), out_proj(out_proj), mixer(mixer), gated_norm(gated_norm) {
    int64_t hidden = residual.hidden_size(), inner = gated_norm.numel();
    check_dense(gated_norm, "gated_norm", {inner}, residual.norm.scalar_type());
    check_projection(in_proj.matrix, "in_proj", residual.norm, inner + mixer->channels + mixer->heads, hidden);
    check_projection(out_proj.matrix, "out_proj", residual.norm, hidden, inner);
  }

  void adapt(int64_t adapter, const std::string& projection, const LowRank& addition) {
    granite4_neuron::adapt({{"in_proj", in_proj}, {"out_proj", out_proj}}, projection, adapter, addition);
  }

  // z, x, B, C and dt of each token side by side: [..., inner + channels + heads].
  at::Tensor project(const at::Tensor& hidden_states, const AdapterRows& adapters = {}) const {
    return in_proj(residual.normalised(hidden_states), adapters);
  }
  at::Tensor mixer_inputs(const at::Tensor& projected) const {
    int64_t inner = gated_norm.numel();
    return projected.narrow(-1, inner, projected.size(-1) - inner);
  }
  // y: of the mixer, [..., inner] in float32.
  at::Tensor finish(
      const at::Tensor& hidden_states, const at::Tensor& projected, const at::Tensor& y,
      const AdapterRows& adapters = {}) const {
    TORCH_CHECK(
        projected.size(-1) == in_proj.rows(), "projected has ", projected.size(-1),
        " values of a token and should have ", in_proj.rows());
    at::Tensor z = projected.narrow(-1, 0, gated_norm.numel());
    at::Tensor gated = rms_norm(y, z, gated_norm, residual.eps, mixer->settings.groups);
    return residual.add(hidden_states, out_proj(gated, adapters));
  }
  // hidden_states: [tokens, hidden_size]. Returns the new hidden_states, and the mixer's inputs.
  std::tuple<at::Tensor, at::Tensor> step(
      const at::Tensor& hidden_states, const MixerState& state, const SlotRows& rows,
      const AdapterRows& adapters) const {
    at::Tensor projected = project(hidden_states, adapters), inputs = mixer_inputs(projected);
    return {finish(hidden_states, projected, mamba_mixer(*mixer, inputs, state, rows), adapters), inputs};
  }
  // hidden_states: [tokens, hidden_size].
  at::Tensor step_paged(const at::Tensor& hidden_states, const MixerState& state, const PageRows& rows) const {
    at::Tensor projected = project(hidden_states);
    return finish(hidden_states, projected, paged_mamba_mixer(*mixer, mixer_inputs(projected), state, rows));
  }
};

// Keys and values of a layer: each [slots, kv_heads, max_length, head_dim], or [pages, kv_heads, page_size, head_dim].
struct Cache {
  at::Tensor key, value;
};

// hidden_states + multiplier * o_proj(attention(q, k, v)), where these are projections of rms_norm(hidden_states).
struct AttentionLayer : torch::CustomClassHolder {
  const Residual residual;
  Linear q_proj, k_proj, v_proj, o_proj;
  const int64_t head_dim;
  const double scale;  // of the scores

  AttentionLayer(
      const Residual& residual, const Linear& q_proj, const Linear& k_proj, const Linear& v_proj,
      const Linear& o_proj, int64_t head_dim, double scale)
      : residual(residual), q_proj(q_proj), k_proj(k_proj), v_proj(v_proj), o_proj(o_proj), head_dim(head_dim),
        scale(scale) {
    int64_t hidden = residual.hidden_size(), width = q_proj.rows(), kv_width = k_proj.rows();
    TORCH_CHECK(
        head_dim > 0 && kv_width > 0 && kv_width % head_dim == 0 && width % kv_width == 0, "projections have ", width,
        " and ", kv_width, " rows for heads of ", head_dim);
    check_projection(q_proj.matrix, "q_proj", residual.norm, width, hidden);
    check_projection(k_proj.matrix, "k_proj", residual.norm, kv_width, hidden);
    check_projection(v_proj.matrix, "v_proj", residual.norm, kv_width, hidden);
    check_projection(o_proj.matrix, "o_proj", residual.norm, hidden, width);
  }

  void adapt(int64_t adapter, const std::string& projection, const LowRank& addition) {
    granite4_neuron::adapt(
        {{"q_proj", q_proj}, {"k_proj", k_proj}, {"v_proj", v_proj}, {"o_proj", o_proj}}, projection, adapter,
        addition);
  }

  // hidden_states: [tokens, hidden_size]. rotary: tables for the tokens' positions, [1, tokens, head_dim / 2], if the
  // model has rotary positions.
  at::Tensor step(
      const at::Tensor& hidden_states, const Cache& cache, const CacheRows& rows,
      const std::optional<RotaryTables>& rotary, const AdapterRows& adapters) const {
    auto [query, key, value] = project(hidden_states, rotary, adapters);
    write_rows(cache.key, key, rows);
    write_rows(cache.value, value, rows);
    at::Tensor y = attend_rows(query, cache.key, cache.value, rows, scale);
    return residual.add(hidden_states, o_proj(y.flatten(1), adapters));
  }
  // The same over a cache in pages.
  at::Tensor step_paged(
      const at::Tensor& hidden_states, const Cache& pages, const SequenceRows& rows,
      const std::optional<RotaryTables>& rotary) const {
    auto [query, key, value] = project(hidden_states, rotary, {});
    at::Tensor y =
        paged_attention(query.flatten(1), key.flatten(1), value.flatten(1), pages.key, pages.value, rows, scale);
    return residual.add(hidden_states, o_proj(y, {}));
  }

 private:
  // Queries, keys and values, each [tokens, its heads, head_dim].
  std::tuple<at::Tensor, at::Tensor, at::Tensor> project(
      const at::Tensor& hidden_states, const std::optional<RotaryTables>& rotary, const AdapterRows& adapters) const {
    check_shape(hidden_states, "hidden_states", {-1, residual.hidden_size()});
    at::Tensor x = residual.normalised(hidden_states);
    auto heads = [&](const Linear& projection) {
      return projection(x, adapters).view({x.size(0), projection.rows() / head_dim, head_dim});
    };
    at::Tensor query = heads(q_proj), key = heads(k_proj), value = heads(v_proj);
    if (rotary.has_value()) {
      apply_rotary(query.unsqueeze(0), *rotary);
      apply_rotary(key.unsqueeze(0), *rotary);
    }
    return {query, key, value};
  }
};

// As ops.mlp.
inline at::Tensor mlp(const at::Tensor& x, const Weight& input, const Weight& output) {
  return linear(activate(linear(x, input, std::nullopt), output.columns), output, std::nullopt);
}

// The number of rows of the first matrix of an MLP or an expert whose second matrix has `width` columns: `width`
// without a gate; twice that, for gate and up, otherwise.
inline int64_t rows_before(const Matrix& input, int64_t width) {
  return input.weight.rows == width ? width : 2 * width;
}

// The router takes vectors in float32 if it chooses by `topk_sigmoid`.
struct Experts {
  Matrix router;
  ExpertLinear input, output;
  int64_t top_k;
  std::optional<SigmoidChoice> sigmoid;
  std::optional<Linear> latent_input, latent_output;  // both or none

  // The width of the vectors that an expert takes and returns, in a model of this width.
  int64_t width(int64_t hidden) const {
    return latent_input.has_value() ? latent_input->rows() : hidden;
  }

  // x: [tokens, hidden_size].
  std::pair<at::Tensor, at::Tensor> choose(const at::Tensor& x) const {
    if (!sigmoid.has_value()) return topk_softmax(logits(x, router.weight, 1.0), top_k);
    return topk_sigmoid(logits(x.to(at::kFloat), router.weight, 1.0), top_k, *sigmoid);
  }

  // x: [tokens, hidden_size].
  at::Tensor operator()(const at::Tensor& x, const AdapterRows& adapters) const {
    auto [topk_weights, topk_ids] = choose(x);
    at::Tensor sum = fused_experts(
        latent_input.has_value() ? (*latent_input)(x, adapters) : x, input.matrix.weight, output.matrix.weight,
        topk_weights, topk_ids, input.additions.of_experts(adapters), output.additions.of_experts(adapters));
    return latent_output.has_value() ? (*latent_output)(sum, adapters) : sum;
  }
};

// hidden_states + multiplier * mlp(x) + multiplier * experts(x), where x = rms_norm(hidden_states).
struct FeedForward : torch::CustomClassHolder {
  const Residual residual;
  Linear input, output;
  std::optional<Experts> experts;

  FeedForward(
      const Residual& residual, const Linear& input, const Linear& output, const std::optional<Experts>& experts)
      : residual(residual), input(input), output(output), experts(experts) {
    int64_t hidden = residual.hidden_size();
    int64_t mlp_width = output.matrix.weight.columns;
    check_projection(input.matrix, "input", residual.norm, rows_before(input.matrix, mlp_width), hidden);
    check_projection(output.matrix, "output", residual.norm, hidden, mlp_width);
    if (!experts.has_value()) return;
    const Matrix &first = experts->input.matrix, &second = experts->output.matrix;
    int64_t width = second.weight.columns, count = experts->router.weight.rows, top_k = experts->top_k;
    const at::Tensor& routed = experts->sigmoid.has_value() ? experts->sigmoid->correction_bias : residual.norm;
    check_projection(experts->router, "router", routed, count, hidden);
    int64_t inner = experts->width(hidden);
    check_projection(first, "expert_input", residual.norm, rows_before(first, width), inner);
    check_projection(second, "expert_output", residual.norm, inner, width);
    if (experts->latent_input.has_value()) {
      check_projection(experts->latent_input->matrix, "latent_input", residual.norm, inner, hidden);
      check_projection(experts->latent_output->matrix, "latent_output", residual.norm, hidden, inner);
    }
    for (const Matrix* matrix : {&first, &second})
      TORCH_CHECK(
          matrix->weight.experts == count, "there are matrices of ", matrix->weight.experts, " experts, and ", count,
          " experts");
    TORCH_CHECK(0 < top_k && top_k <= count, "top_k is ", top_k, " of ", count, " experts");
  }

  void adapt(int64_t adapter, const std::string& projection, const LowRank& addition) {
    std::map<std::string, Adaptable> projections{{"input", input}, {"output", output}};
    if (experts.has_value()) {
      projections.emplace("expert_input", experts->input);
      projections.emplace("expert_output", experts->output);
      if (experts->latent_input.has_value()) {
        projections.emplace("expert_fc1_latent_proj", *experts->latent_input);
        projections.emplace("expert_fc2_latent_proj", *experts->latent_output);
      }
    }
    granite4_neuron::adapt(projections, projection, adapter, addition);
  }

  // hidden_states: [..., hidden_size], float32.
  at::Tensor step(const at::Tensor& hidden_states, const AdapterRows& adapters = {}) const {
    at::Tensor x = residual.normalised(hidden_states);
    at::Tensor activated = activate(input(x, adapters), output.matrix.weight.columns);
    at::Tensor sum = residual.add(hidden_states, output(activated, adapters));
    if (!experts.has_value()) return sum;
    at::Tensor tokens = x.view({-1, x.size(-1)});
    return residual.add(sum, (*experts)(tokens, adapters).view(hidden_states.sizes()));
  }
};

}  // namespace granite4_neuron
