// All decoder layers as one call, and a whole step, from tokens to logits, as one call. This saves Python's time between
// short kernels, and keeps the threads of torch idle, which would otherwise compete with those of the kernels.
//
// The definition is in Python: `LayerLoop` of model.stack, and `HybridForCausalLM.forward`.
#pragma once

#include <variant>

#include "buffers.h"
#include "layers.h"
#include "packing.h"

namespace granite4_neuron {

// The conv_state and ssm_state of each mixer, or its caches of keys and values.
using LayerStates = std::vector<std::tuple<at::Tensor, at::Tensor>>;

// Embedding, final norm and head. Without an embedding of its own it uses the head's matrix.
struct EmbeddingAndHead {
  Matrix head;
  std::optional<at::Tensor> embedding;  // [rows, hidden_size]
  double embedding_multiplier;
  at::Tensor norm;  // [hidden_size]
  double eps, logits_scaling;

  // Rows of the embedding for tokens, times its multiplier: [tokens, hidden_size] in float32.
  at::Tensor embed(const at::Tensor& tokens) const {
    at::Tensor x = embedding.has_value() ? table_rows(tokens) : weight_rows(head.weight, tokens);
    float* values = x.mutable_data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); i++) values[i] *= static_cast<float>(embedding_multiplier);
    return x;
  }
  // hidden_states: [tokens, hidden_size]. Returns [tokens, vocab_size] in float32.
  at::Tensor predict(const at::Tensor& hidden_states) const {
    return logits(rms_norm(hidden_states, std::nullopt, norm, eps, 1), head.weight, logits_scaling);
  }

 private:
  at::Tensor table_rows(const at::Tensor& tokens) const {
    int64_t rows = embedding->size(0), width = embedding->size(1);
    at::Tensor x = empty({tokens.numel(), width}, tokens.options().dtype(at::kFloat));
    GRANITE4_DISPATCH(embedding->scalar_type(), "embed", [&] {
      for (int64_t i = 0; i < tokens.numel(); i++) {
        int64_t token = tokens.const_data_ptr<int64_t>()[i];
        TORCH_CHECK(0 <= token && token < rows, "there is no token ", token, " of ", rows);
        to_float(embedding->const_data_ptr<scalar_t>() + token * width, x.mutable_data_ptr<float>() + i * width, width);
      }
    });
    return x;
  }
};

// `Decoder` of devices/cpu/layers.py.
class Decoder : public torch::CustomClassHolder {
 public:
  void append_mamba(const c10::intrusive_ptr<MambaLayer>& half) {
    halves_.push_back(half);
    mixers_++;
  }
  void append_attention(const c10::intrusive_ptr<AttentionLayer>& half) {
    halves_.push_back(half);
    mixers_++;
  }
  void append_feed_forward(const c10::intrusive_ptr<FeedForward>& half) {
    halves_.push_back(half);
  }

  void set_embedding_and_head(const EmbeddingAndHead& given) {
    check_matrix(given.head.weight);
    int64_t hidden = given.head.weight.columns;
    check_dense(given.norm, "norm", {hidden}, given.norm.scalar_type());
    if (given.embedding.has_value())
      check_dense(*given.embedding, "embedding", {-1, hidden}, given.embedding->scalar_type());
    embedding_and_head_ = given;
  }

  // Returns hidden_states, [tokens, hidden_size] in float32, after all layers; with `keep_inputs`, then the inputs of
  // each Mamba layer's mixer. slots: of the caches, [rows]. adapters: of the rows, see `adapter_rows`.
  std::vector<at::Tensor> step(
      at::Tensor hidden_states, const LayerStates& states, const SlotRows& rows, const at::Tensor& slots,
      const std::optional<at::Tensor>& adapters, const std::optional<RotaryTables>& rotary, bool keep_inputs) const {
    check_states(states);
    check_shape(hidden_states, "hidden_states", {-1, -1});
    AdapterRows adapted = adapter_rows(adapters, rows.tokens, hidden_states.size(0));
    std::vector<at::Tensor> kept;
    CacheRows cache_rows{rows.tokens, slots, rows.starts};
    size_t mixer = 0;
    for (const auto& half : halves_) {
      if (const auto* mamba = std::get_if<Mamba>(&half)) {
        const auto& [conv_state, ssm_state] = states[mixer++];
        auto [sum, inputs] = (*mamba)->step(hidden_states, {conv_state, ssm_state}, rows, adapted);
        hidden_states = sum;
        if (keep_inputs) kept.push_back(inputs);
      } else if (const auto* attention = std::get_if<Attention>(&half)) {
        const auto& [key, value] = states[mixer++];
        hidden_states = (*attention)->step(hidden_states, {key, value}, cache_rows, rotary, adapted);
      } else {
        hidden_states = std::get<c10::intrusive_ptr<FeedForward>>(half)->step(hidden_states, adapted);
      }
    }
    kept.insert(kept.begin(), hidden_states);
    return kept;
  }

  // Logits after each row's last token, [rows, vocab_size] in float32. tokens: of all rows, one row after another.
  // starts, lengths, slots: of each row the position of its first token, how many it has, and its slot.
  at::Tensor forward_packed(
      const at::Tensor& tokens, at::IntArrayRef starts, at::IntArrayRef lengths, at::IntArrayRef slots,
      const LayerStates& states) const {
    TORCH_CHECK(embedding_and_head_.has_value(), "the embedding and the head are not set");
    TORCH_CHECK(starts.size() == lengths.size() && slots.size() == lengths.size(), "rows have one start and one slot");
    check_dense(tokens, "tokens", {-1}, at::kLong);
    std::vector<int64_t> read_slots(slots.begin(), slots.end()), offsets, last;
    int64_t end = 0;
    for (size_t row = 0; row < lengths.size(); row++) {
      TORCH_CHECK(lengths[row] > 0, "a row has length ", lengths[row], " and should have a token");
      if (starts[row] == 0) read_slots[row] = 0;
      offsets.push_back(end);
      end += lengths[row];
      last.push_back(end - 1);
    }
    at::Tensor write_slots = numbers(slots);
    SlotRows rows{{numbers(offsets), numbers(lengths)}, numbers(read_slots), write_slots, numbers(starts)};
    check_packed(rows.tokens, tokens.numel());
    at::Tensor hidden_states = step(embedding_and_head_->embed(tokens), states, rows, write_slots, {}, {}, false)[0];
    bool are_all = static_cast<int64_t>(last.size()) == tokens.numel();
    return embedding_and_head_->predict(are_all ? hidden_states : rows_of(hidden_states, last));
  }

  // Advance the Mamba layers' states by inputs that a step kept.
  void advance(const at::TensorList& kept_inputs, const LayerStates& states, const SlotRows& rows) const {
    check_states(states);
    size_t mixer = 0, next = 0;
    for (const auto& half : halves_) {
      if (std::holds_alternative<Attention>(half)) mixer++;
      const auto* mamba = std::get_if<Mamba>(&half);
      if (mamba == nullptr) continue;
      TORCH_CHECK(next < kept_inputs.size(), "there are inputs of ", kept_inputs.size(), " Mamba layers only");
      const auto& [conv_state, ssm_state] = states[mixer++];
      mamba_mixer(*(*mamba)->mixer, kept_inputs[next++], {conv_state, ssm_state}, rows);
    }
  }

 private:
  using Mamba = c10::intrusive_ptr<MambaLayer>;
  using Attention = c10::intrusive_ptr<AttentionLayer>;

  static at::Tensor numbers(at::IntArrayRef values) {
    at::Tensor tensor = empty({static_cast<int64_t>(values.size())}, at::TensorOptions(at::kLong));
    std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
    return tensor;
  }
  // Some rows of x [rows, columns], float32.
  static at::Tensor rows_of(const at::Tensor& x, const std::vector<int64_t>& chosen) {
    int64_t columns = x.size(1);
    at::Tensor y = empty({static_cast<int64_t>(chosen.size()), columns}, x.options());
    float* to = y.mutable_data_ptr<float>();
    for (int64_t row : chosen) to = std::copy_n(x.const_data_ptr<float>() + row * columns, columns, to);
    return y;
  }
  void check_states(const LayerStates& states) const {
    TORCH_CHECK(states.size() == mixers_, "there are states of ", states.size(), " mixers of ", mixers_);
  }

  std::vector<std::variant<Mamba, Attention, c10::intrusive_ptr<FeedForward>>> halves_;  // of layers, in order
  size_t mixers_ = 0;
  std::optional<EmbeddingAndHead> embedding_and_head_;
};

}  // namespace granite4_neuron
