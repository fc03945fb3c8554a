// The halves of decoder layers.
//
// The definitions are in Python: model.mamba2.Mamba2 and model.attention.Attention, each behind a norm, and
// model.moe.feed_forward.
#pragma once

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "mamba.h"
#include "norm.h"
#include "paged.h"
#include "rotary.h"

namespace granite4_neuron {

// A projection.
struct Linear {
  Weight weight;
  std::optional<at::Tensor> bias;  // [rows]
};

inline at::Tensor linear(const at::Tensor& x, const Linear& projection) {
  return linear(x, projection.weight, projection.bias);
}

struct MambaBlockWeights {
  at::Tensor norm;  // [hidden_size]
  Linear in_proj;
  MixerWeights mixer;
  at::Tensor gated_norm;  // [inner]
  Linear out_proj;
};

// eps: of a block's norms. residual_multiplier: of what a block adds.
struct BlockConstants {
  double eps, residual_multiplier;
};

// hidden_states + residual_multiplier * out_proj(rms_norm_gated(y, z)), where y = mixer(xBC, dt) and (z, xBC, dt) =
// in_proj(rms_norm(hidden_states)).
//
// hidden_states: [..., hidden_size], float32; mixer: `mamba_mixer` or `paged_mamba_mixer`, which say what leading
// dimensions and rows there are. Returns what becomes of hidden_states, and the mixer's inputs.
template <typename MixerFunction>
inline std::tuple<at::Tensor, at::Tensor> mamba_block(
    const MixerFunction& mixer, const at::Tensor& hidden_states, const MambaBlockWeights& weights,
    const MixerState& state, at::TensorList rows, const MixerSettings& settings, const BlockConstants& constants) {
  auto [eps, residual_multiplier] = constants;
  at::Tensor x = rms_norm(hidden_states, std::nullopt, weights.norm, eps, 1);
  at::Tensor projected = linear(x, weights.in_proj);
  int64_t inner = weights.gated_norm.numel();
  at::Tensor z = projected.narrow(-1, 0, inner), xBC_dt = projected.narrow(-1, inner, projected.size(-1) - inner);
  at::Tensor y = mixer(xBC_dt, weights.mixer, state, rows, settings);
  at::Tensor gated = rms_norm(y, z, weights.gated_norm, eps, settings.groups);
  return {residual_add(hidden_states, linear(gated, weights.out_proj), residual_multiplier), xBC_dt};
}

struct AttentionBlockWeights {
  at::Tensor norm;  // [hidden_size]
  Linear q_proj, k_proj, v_proj, o_proj;
};

// Keys and values of a layer, each [slots, kv_heads, max_length, head_dim].
struct Cache {
  at::Tensor key, value;
};

// Each row's number of real tokens and its slot of the cache, [batch]; its first token's position, [batch, 1]; and
// cosines and sines of the tokens' positions where the model has rotary ones, [batch, tokens, head_dim / 2].
struct AttentionRows {
  at::Tensor lengths, slots, starts;
  std::optional<RotaryTables> rotary;
};

// hidden_states + residual_multiplier * o_proj(attention(q, k, v)), where these are projections of
// rms_norm(hidden_states). hidden_states: [batch, tokens, hidden_size], float32. scale: of the scores.
inline at::Tensor attention_block(
    const at::Tensor& hidden_states, const AttentionBlockWeights& weights, const Cache& cache,
    const AttentionRows& rows, double scale, const BlockConstants& constants) {
  auto [eps, residual_multiplier] = constants;
  check_shape(hidden_states, "hidden_states", {-1, -1, -1});
  check_shape(cache.key, "keys' cache", {-1, -1, -1, -1});
  int64_t batch = hidden_states.size(0), tokens = hidden_states.size(1), head_dim = cache.key.size(3);
  at::Tensor x = rms_norm(hidden_states, std::nullopt, weights.norm, eps, 1);
  auto heads = [&](const Linear& projection) { 
    int64_t rows = projection.weight.rows;
    TORCH_CHECK(head_dim > 0 && rows % head_dim == 0, "a projection has ", rows, " rows for heads of ", head_dim);
    return linear(x, projection).view({batch, tokens, rows / head_dim, head_dim});
  };
  at::Tensor query = heads(weights.q_proj), key = heads(weights.k_proj), value = heads(weights.v_proj);
  if (rows.rotary.has_value()) {
    apply_rotary(query, *rows.rotary);
    apply_rotary(key, *rows.rotary);
  }
  write_cache(cache.key, key, rows.starts, rows.lengths, rows.slots);
  write_cache(cache.value, value, rows.starts, rows.lengths, rows.slots);
  at::Tensor y = cached_attention(query, cache.key, cache.value, rows.starts, rows.lengths, rows.slots, scale);
  return residual_add(hidden_states, linear(y.flatten(2), weights.o_proj), residual_multiplier);
}

// As ops.mlp.
inline at::Tensor mlp(const at::Tensor& x, const Weight& input, const Weight& output) {
  return linear(silu_and_mul(linear(x, input, std::nullopt)), output, std::nullopt);
}

struct ExpertWeights {
  Weight router, input, output;
};

struct FeedForwardWeights {
  at::Tensor norm;  // [hidden_size]
  Weight input, output;
  std::optional<ExpertWeights> experts;
};

// As ops.cpu.blocks.FeedForwardBlock. top_k: experts per token.
inline at::Tensor feed_forward_block(
    const at::Tensor& hidden_states, const FeedForwardWeights& weights, int64_t top_k,
    const BlockConstants& constants) {
  auto [eps, residual_multiplier] = constants;
  const auto& [norm, input, output, experts] = weights;
  at::Tensor x = rms_norm(hidden_states, std::nullopt, norm, eps, 1);
  at::Tensor sum = residual_add(hidden_states, mlp(x, input, output), residual_multiplier);
  if (!experts.has_value()) return sum;
  at::Tensor tokens = x.view({-1, x.size(-1)});
  auto [topk_weights, topk_ids] = topk_softmax(logits(tokens, experts->router, 1.0), top_k);
  at::Tensor of_experts = fused_experts(tokens, experts->input, experts->output, topk_weights, topk_ids);
  return residual_add(sum, of_experts.view(hidden_states.sizes()), residual_multiplier);
}

}  // namespace granite4_neuron
