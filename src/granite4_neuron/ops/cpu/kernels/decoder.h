// All decoder layers as one call: the time that Python takes between short kernels is saved.
//
// The definition is in Python: the layers of modeling_granite_moe_hybrid, one after another.
#pragma once

#include "layers.h"
#include "lists.h"

namespace granite4_neuron {

// What all layers have in common. top_k: experts per token, 0 without experts; seed, rounds: of the rounding of SSM
// states, whose stream is the layer's number.
struct DecoderSettings {
  int64_t groups, chunk_size, heads_per_task, top_k, seed, rounds;
  double dt_low, dt_high, eps, residual_multiplier, attention_scale;

  MixerSettings of_mixer(int64_t layer) const {
    return {groups, chunk_size, heads_per_task, static_cast<float>(dt_low), static_cast<float>(dt_high),
            {static_cast<uint64_t>(seed), static_cast<uint32_t>(layer), rounds}};
  }
};

// The rows of a step: lengths, read_slots, write_slots and starts, as `mamba_mixer` has them; the slots of the caches;
// and cosines and sines where the model has rotary positions.
inline AttentionRows attention_rows(at::TensorList rows) {
  TORCH_CHECK(rows.size() == 5 || rows.size() == 7, "there are ", rows.size(), " tensors about rows");
  AttentionRows of_attention{rows[0], rows[4], rows[3].unsqueeze(-1), std::nullopt};
  if (rows.size() == 7) of_attention.rotary = {rows[5], rows[6]};
  return of_attention;
}

// As ops.cpu.decoder.DecoderLayers. hidden_states: [batch, tokens, hidden_size], float32. states: two of each layer: of
// a Mamba layer the convolution's and the SSM's, of an attention layer keys and values, which have a dimension more
// than the former. Returns what becomes of hidden_states, and with `keep_inputs` the Mamba layers' inputs behind it.
inline std::vector<at::Tensor> decoder_layers(
    at::Tensor hidden_states, Matrices matrices, WeightList weights, at::TensorList states, at::TensorList rows,
    const DecoderSettings& settings, bool keep_inputs) {
  TORCH_CHECK(states.size() % 2 == 0, "there are ", states.size(), " states, which are not two of each layer");
  AttentionRows of_attention = attention_rows(rows);
  BlockConstants constants{settings.eps, settings.residual_multiplier};
  std::vector<at::Tensor> kept;
  for (int64_t layer = 0; layer < static_cast<int64_t>(states.size()) / 2; layer++) {
    const at::Tensor &first = states[2 * layer], &second = states[2 * layer + 1];
    if (first.dim() == 4) {
      hidden_states = attention_block(
          hidden_states, attention_weights(matrices, weights), {first, second}, of_attention,
          settings.attention_scale, constants);
    } else {
      auto [sum, inputs] = mamba_block(
          mamba_mixer, hidden_states, mamba_weights(matrices, weights), {first, second}, rows.slice(0, 4),
          settings.of_mixer(layer), constants);
      hidden_states = sum;
      if (keep_inputs) kept.push_back(inputs);
    }
    hidden_states = feed_forward_block(
        hidden_states, feed_forward_weights(matrices, weights.next(), settings.top_k > 0), settings.top_k, constants);
  }
  kept.insert(kept.begin(), hidden_states);
  return kept;
}

}  // namespace granite4_neuron
