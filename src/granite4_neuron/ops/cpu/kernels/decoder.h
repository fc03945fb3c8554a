// All decoder layers as one call: the time that Python takes between short kernels is saved.
//
// The definition is in Python: the layers of modeling_granite_moe_hybrid, one after another.
#pragma once

#include <variant>

#include "layers.h"

namespace granite4_neuron {

// Of each layer conv_state and ssm_state, or the caches of keys and values.
using LayerStates = std::vector<std::tuple<at::Tensor, at::Tensor>>;

// `Decoder` of ops/cpu/layers.py.
class Decoder : public torch::CustomClassHolder {
 public:
  void append_mamba(const c10::intrusive_ptr<MambaLayer>& mixer, const c10::intrusive_ptr<FeedForward>& feed_forward) {
    layers_.push_back({mixer, feed_forward});
  }
  void append_attention(
      const c10::intrusive_ptr<AttentionLayer>& mixer, const c10::intrusive_ptr<FeedForward>& feed_forward) {
    layers_.push_back({mixer, feed_forward});
  }

  // What becomes of hidden_states, [batch, tokens, hidden_size] in float32; with `keep_inputs`, behind it the inputs of
  // each Mamba layer's mixer. slots: of the caches, [batch]. adapters: of the rows, see `adapter_rows`.
  std::vector<at::Tensor> step(
      at::Tensor hidden_states, const LayerStates& states, const SlotRows& rows, const at::Tensor& slots,
      const std::optional<at::Tensor>& adapters, const std::optional<RotaryTables>& rotary, bool keep_inputs) const {
    check_states(states);
    AdapterRows adapted = adapter_rows(adapters, hidden_states.size(0), hidden_states.size(1));
    std::vector<at::Tensor> kept;
    CacheRows cache_rows{rows.lengths, slots, rows.starts.unsqueeze(-1)};
    for (size_t i = 0; i < layers_.size(); i++) {
      const auto& [first, second] = states[i];
      const auto& [mixer, feed_forward] = layers_[i];
      if (const auto* mamba = std::get_if<Mamba>(&mixer)) {
        auto [sum, inputs] = (*mamba)->step(hidden_states, {first, second}, rows, adapted);
        hidden_states = sum;
        if (keep_inputs) kept.push_back(inputs);
      } else {
        const auto& attention = std::get<Attention>(mixer);
        hidden_states = attention->step(hidden_states, {first, second}, cache_rows, rotary, adapted);
      }
      hidden_states = feed_forward->step(hidden_states, adapted);
    }
    kept.insert(kept.begin(), hidden_states);
    return kept;
  }

  // Advance the Mamba layers' states by inputs that a step kept.
  void advance(const at::TensorList& kept_inputs, const LayerStates& states, const SlotRows& rows) const {
    check_states(states);
    size_t next = 0;
    for (size_t i = 0; i < layers_.size(); i++) {
      const auto* mamba = std::get_if<Mamba>(&layers_[i].mixer);
      if (mamba == nullptr) continue;
      TORCH_CHECK(next < kept_inputs.size(), "there are inputs of ", kept_inputs.size(), " Mamba layers only");
      mamba_mixer(*(*mamba)->mixer, kept_inputs[next++], {std::get<0>(states[i]), std::get<1>(states[i])}, rows);
    }
  }

 private:
  using Mamba = c10::intrusive_ptr<MambaLayer>;
  using Attention = c10::intrusive_ptr<AttentionLayer>;
  struct Layer {
    std::variant<Mamba, Attention> mixer;
    c10::intrusive_ptr<FeedForward> feed_forward;
  };

  void check_states(const LayerStates& states) const {
    TORCH_CHECK(states.size() == layers_.size(), "there are states of ", states.size(), " layers of ", layers_.size());
  }

  std::vector<Layer> layers_;
};

}  // namespace granite4_neuron
