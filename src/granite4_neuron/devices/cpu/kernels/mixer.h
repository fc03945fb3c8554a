// Types that the parts of the Mamba-2 mixer share: a layer's weights and settings, and one call's sizes and rows.
#pragma once

#include "common.h"
#include "rounding.h"

namespace granite4_neuron {

// The weights between a layer's projections. The convolution's weights are in the dtype of its inputs, the others in
// any.
struct MixerWeights {
  at::Tensor conv_weight;               // [channels, 1, width]
  std::optional<at::Tensor> conv_bias;  // [channels]
  at::Tensor dt_bias, A_log, D;         // [heads]
};

// A layer's recurrent state, which a call advances in place.
struct MixerState {
  at::Tensor conv;  // [slots, channels, width - 1], in the dtype of the inputs
  at::Tensor ssm;   // [slots, heads, head_dim, d_state], float32, bfloat16 or float16
};

// For each row: the number of its first token in the step, its number of real tokens, the slots where its state is read
// and written, and its first token's place in the sequence. A write slot of -1 says that the state is not written.
struct Rows {
  const int64_t *offsets, *lengths, *read_slots, *write_slots, *starts;
};

constexpr int64_t MAX_SCAN_BLOCK = 128;

// groups: of heads that share B and C. chunk_size: tokens applied to a part of a state at a time, MAX_SCAN_BLOCK at
// most. heads_per_task: head states per task of a thread, for rows of one token. dt_low, dt_high: the limits of step
// sizes. rounding: for SSM states that are not float32.
struct MixerSettings {
  int64_t groups, chunk_size, heads_per_task;
  float dt_low, dt_high;
  Rounding rounding;
};

// The convolution's weights for vectors of channels.
struct Filter {
  std::vector<float> taps;  // [width, channels], the last tap multiplies the current token
  std::vector<float> bias;  // [channels], zeros where the layer has none
};

// One call. longest: the most tokens of a row.
struct Mixer {
  int64_t num_rows, longest, heads, head_dim, d_state, width, channels;
  Rows rows;
  const MixerSettings& settings;
  const std::vector<float>&dt_bias, &A, &D;  // [heads]
  const Filter& filter;

  int64_t inner() const {
    return heads * head_dim;
  }
  int64_t group_of(int64_t head) const {
    return head * settings.groups / heads;
  }
};

inline std::vector<float> as_floats(const at::Tensor& tensor) {
  std::vector<float> values(tensor.numel());
  GRANITE4_DISPATCH(tensor.scalar_type(), "as_floats", [&] {
    to_float(tensor.const_data_ptr<scalar_t>(), values.data(), tensor.numel());
  });
  return values;
}

// [channels, columns] of any dtype to [columns, channels] in float32.
template <typename T>
inline void transpose_to_float(const T* from, int64_t channels, int64_t columns, float* to) {
  for (int64_t c = 0; c < channels; c++)
    for (int64_t i = 0; i < columns; i++) to[i * channels + c] = static_cast<float>(from[c * columns + i]);
}

inline Filter filter_of(const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  int64_t channels = weight.size(0), width = weight.size(2);
  Filter filter{std::vector<float>(width * channels), std::vector<float>(channels)};
  GRANITE4_DISPATCH(weight.scalar_type(), "filter_of", [&] {
    transpose_to_float(weight.const_data_ptr<scalar_t>(), channels, width, filter.taps.data());
  });
  if (bias.has_value()) filter.bias = as_floats(*bias);
  return filter;
}

// A = -exp(A_log).
inline std::vector<float> decay_rates(const at::Tensor& A_log) {
  std::vector<float> rates = as_floats(A_log);
  int64_t count = rates.size();
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t lanes = std::min(LANES, count - i);
    Vec::loadu(&rates[i], lanes).exp().neg().store(&rates[i], lanes);
  }
  return rates;
}

// The mixer of one layer, made once. The sizes that no weight shows, head_dim and d_state, are taken from the state.
struct MambaMixer {
  const MixerWeights weights;
  const MixerSettings settings;
  const int64_t channels, width, heads;
  const std::vector<float> dt_bias, A, D;  // [heads]
  const Filter filter;

  MambaMixer(const MixerWeights& w, const MixerSettings& s)
      : weights((check(w, s), w)), settings(s), channels(w.conv_weight.size(0)), width(w.conv_weight.size(2)),
        heads(w.dt_bias.numel()), dt_bias(as_floats(w.dt_bias)), A(decay_rates(w.A_log)), D(as_floats(w.D)),
        filter(filter_of(w.conv_weight, w.conv_bias)) {}

 private:
  static void check(const MixerWeights& weights, const MixerSettings& settings) {
    const at::Tensor& conv = weights.conv_weight;
    check_dense(conv, "conv_weight", {-1, 1, -1}, conv.scalar_type());
    TORCH_CHECK(conv.size(2) > 0, "conv_weight has no taps");
    if (weights.conv_bias.has_value())
      check_dense(*weights.conv_bias, "conv_bias", {conv.size(0)}, conv.scalar_type());
    int64_t heads = weights.dt_bias.numel(), groups = settings.groups, rounds = settings.rounding.rounds;
    check_dense(weights.dt_bias, "dt_bias", {heads}, weights.dt_bias.scalar_type());
    check_dense(weights.A_log, "A_log", {heads}, weights.A_log.scalar_type());
    check_dense(weights.D, "D", {heads}, weights.D.scalar_type());
    TORCH_CHECK(groups > 0 && heads > 0 && heads % groups == 0, "n_groups is ", groups, " of ", heads, " heads");
    TORCH_CHECK(settings.heads_per_task > 0, "heads_per_task is ", settings.heads_per_task, " and should be above 0");
    TORCH_CHECK(
        0 < settings.chunk_size && settings.chunk_size <= MAX_SCAN_BLOCK, "chunk_size is ", settings.chunk_size,
        " and should be from 1 to ", MAX_SCAN_BLOCK);
    TORCH_CHECK(
        0 <= rounds && rounds <= Philox::MAX_ROUNDS, "there are ", rounds, " rounds of Philox, of at most ",
        Philox::MAX_ROUNDS);
  }
};

}  // namespace granite4_neuron
