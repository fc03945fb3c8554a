// What the parts of the Mamba-2 mixer share: a layer's weights as the model has them, and one call's sizes, rows and
// constants.
#pragma once

#include "common.h"
#include "rounding.h"

namespace granite4_neuron {

// The weights between a layer's projections, all in the dtype of its inputs.
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

// Of each row of the batch: its number of real tokens, the slots where its state is read and written, and its first
// token's place in the sequence. A write slot of -1, which steps of one token have none of, says that the state is not
// written.
struct Rows {
  const int64_t *lengths, *read_slots, *write_slots, *starts;
};

constexpr int64_t MAX_SCAN_BLOCK = 128;

// groups: of B and C. chunk_size: tokens that pass through a part of a state at a time, MAX_SCAN_BLOCK at most.
// heads_per_task: states that a thread takes at a time in steps of one token. dt_low, dt_high: the limits of step
// sizes. rounding: of SSM states that are not float32.
struct MixerSettings {
  int64_t groups, chunk_size, heads_per_task;
  float dt_low, dt_high;
  Rounding rounding;
};

// One call. The constants are made of the weights anew each time, which takes a fraction of a microsecond: so there are
// no weights but the model's.
struct Mixer {
  int64_t batch, tokens, heads, head_dim, d_state, width, channels;
  Rows rows;
  MixerSettings settings;
  std::vector<float> dt_bias, A, D;  // [heads]

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

}  // namespace granite4_neuron
