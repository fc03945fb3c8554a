// The Mamba-2 mixer between its projections: convolution and recurrence; states are read and written in place.
#pragma once

#include "buffers.h"
#include "conv.h"
#include "scan.h"

namespace granite4_neuron {

// The convolution's weights are of the inputs' dtype; those of the heads may be of any.
inline void check_weights(const at::Tensor& projected, const MixerWeights& weights) {
  check_last_axis(projected, "projected");
  TORCH_CHECK(weights.conv_weight.is_contiguous() && weights.conv_weight.scalar_type() == projected.scalar_type());
  for (const at::Tensor* weight : {&weights.dt_bias, &weights.A_log, &weights.D}) TORCH_CHECK(weight->is_contiguous());
  const auto& bias = weights.conv_bias;
  TORCH_CHECK(!bias.has_value() || (bias->is_contiguous() && bias->scalar_type() == projected.scalar_type()));
}

inline void check_mixer(
    const at::Tensor& projected, const MixerWeights& weights, const MixerState& state, const MixerSettings& settings) {
  check_weights(projected, weights);
  TORCH_CHECK(state.conv.is_contiguous() && state.conv.scalar_type() == projected.scalar_type());
  TORCH_CHECK(state.ssm.is_contiguous());
  int64_t channels = weights.conv_weight.size(0), width = weights.conv_weight.size(-1), heads = state.ssm.size(1);
  TORCH_CHECK(projected.size(2) == channels + heads && weights.dt_bias.numel() == heads);
  TORCH_CHECK(state.conv.size(1) == channels && state.conv.size(2) == width - 1);
  TORCH_CHECK(settings.heads_per_task > 0, "heads_per_task is ", settings.heads_per_task);
  TORCH_CHECK(0 < settings.chunk_size && settings.chunk_size <= MAX_SCAN_BLOCK, "chunk_size is ", settings.chunk_size);
}

// lengths, read_slots, write_slots, starts: [batch], int64. Write slots may be -1 in steps of several tokens.
inline Rows check_all_rows(at::TensorList rows, int64_t tokens, int64_t num_slots) {
  TORCH_CHECK(rows.size() == 4, "rows are lengths, read_slots, write_slots and starts");
  check_rows(rows[0], rows[1], tokens, num_slots);
  check_rows(rows[0], rows[2], tokens, num_slots, tokens > 1 ? -1 : 0);
  TORCH_CHECK(rows[3].is_contiguous() && rows[3].numel() == rows[0].numel());
  return {rows[0].const_data_ptr<int64_t>(), rows[1].const_data_ptr<int64_t>(), rows[2].const_data_ptr<int64_t>(),
          rows[3].const_data_ptr<int64_t>()};
}

// As ops.cpu.mamba_mixer, which is the Python side. Real tokens only are computed; y of padding is 0.
//
// projected: [batch, tokens, channels + heads], tokens at any distance; rows: see `check_all_rows`. Returns y, [batch,
// tokens, heads * head_dim] in float32.
inline at::Tensor mamba_mixer(
    const at::Tensor& projected, const MixerWeights& weights, const MixerState& state, at::TensorList rows,
    const MixerSettings& settings) {
  check_mixer(projected, weights, state, settings);
  int64_t batch = projected.size(0), tokens = projected.size(1);
  int64_t heads = state.ssm.size(1), head_dim = state.ssm.size(2), d_state = state.ssm.size(3);
  int64_t width = weights.conv_weight.size(-1), channels = weights.conv_weight.size(0);
  Mixer m{
      batch, tokens, heads, head_dim, d_state, width, channels,
      check_all_rows(rows, tokens, state.ssm.size(0)), settings,
      as_floats(weights.dt_bias), decay_rates(weights.A_log), as_floats(weights.D)};

  at::Tensor y = empty({batch, tokens, m.inner()}, projected.options().dtype(at::kFloat));
  for (int64_t row = 0; row < batch; row++) {
    float* of_row = y.mutable_data_ptr<float>() + row * y.stride(0);
    std::fill(of_row + m.rows.lengths[row] * y.stride(1), of_row + y.stride(0), 0.0f);
  }
  at::Tensor xBC = empty({batch, tokens, channels}, y.options());
  at::Tensor dt = empty({batch, tokens, heads}, y.options());
  GRANITE4_DISPATCH(projected.scalar_type(), "mamba_mixer", [&] {
    ConvViews<scalar_t> views{
        projected.const_data_ptr<scalar_t>(),
        projected.stride(0),
        projected.stride(1),
        weights.conv_weight.const_data_ptr<scalar_t>(),
        pointer<scalar_t>(weights.conv_bias),
        state.conv.mutable_data_ptr<scalar_t>(),
        xBC.mutable_data_ptr<float>(),
        dt.mutable_data_ptr<float>()};
    convolve_step(m, views);
  });
  GRANITE4_DISPATCH(state.ssm.scalar_type(), "mamba_mixer", [&] {
    scan<scalar_t>(
        m, {xBC.const_data_ptr<float>(), dt.const_data_ptr<float>(), state.ssm.mutable_data_ptr<scalar_t>(),
            y.mutable_data_ptr<float>()});
  });
  return y;
}

}  // namespace granite4_neuron
