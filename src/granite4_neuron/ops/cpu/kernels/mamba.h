// The Mamba-2 mixer between its projections: convolution and recurrence; states are read and written in place.
#pragma once

#include "buffers.h"
#include "conv.h"
#include "scan.h"

namespace granite4_neuron {

// Of the weights alone. The convolution's are of the inputs' dtype; those of the heads may be of any.
inline void check_weights(const MixerWeights& weights) {
  const at::Tensor& conv = weights.conv_weight;
  check_dense(conv, "conv_weight", {-1, 1, -1}, conv.scalar_type());
  TORCH_CHECK(conv.size(2) > 0, "conv_weight has no taps");
  if (weights.conv_bias.has_value())
    check_dense(*weights.conv_bias, "conv_bias", {conv.size(0)}, conv.scalar_type());
  int64_t heads = weights.dt_bias.numel();
  check_dense(weights.dt_bias, "dt_bias", {heads}, weights.dt_bias.scalar_type());
  check_dense(weights.A_log, "A_log", {heads}, weights.A_log.scalar_type());
  check_dense(weights.D, "D", {heads}, weights.D.scalar_type());
}

// Of one call. projected: [..., channels + heads].
inline void check_mixer(
    const at::Tensor& projected, const MixerWeights& weights, const MixerState& state, const MixerSettings& settings) {
  int64_t channels = weights.conv_weight.size(0), heads = weights.dt_bias.numel(), groups = settings.groups;
  check_last_axis(projected, "projected");
  TORCH_CHECK(
      projected.size(-1) == channels + heads, "projected has ", projected.size(-1), " values of a token, for ",
      channels, " channels and ", heads, " heads");
  TORCH_CHECK(projected.scalar_type() == weights.conv_weight.scalar_type(), "projected and conv_weight differ in dtype");
  TORCH_CHECK(projected.scalar_type() == state.conv.scalar_type(), "projected and conv_state differ in dtype");
  check_shape(state.ssm, "ssm_state", {-1, heads, -1, -1});
  at::ScalarType ssm = state.ssm.scalar_type();
  TORCH_CHECK(ssm == at::kFloat || ssm == at::kHalf || ssm == at::kBFloat16, "ssm_state is ", ssm);
  check_shape(state.conv, "conv_state", {state.ssm.size(0), channels, -1});
  int64_t head_dim = state.ssm.size(2), d_state = state.ssm.size(3);
  TORCH_CHECK(heads > 0 && head_dim > 0 && d_state > 0, "ssm_state has the shape ", state.ssm.sizes());
  TORCH_CHECK(groups > 0 && heads % groups == 0, "n_groups is ", groups, " of ", heads, " heads");
  TORCH_CHECK(
      channels == heads * head_dim + 2 * groups * d_state, "there are ", channels, " channels, which are not ", heads,
      " heads of ", head_dim, " and twice ", groups, " groups of ", d_state);
  TORCH_CHECK(settings.heads_per_task > 0, "heads_per_task is ", settings.heads_per_task);
  TORCH_CHECK(0 < settings.chunk_size && settings.chunk_size <= MAX_SCAN_BLOCK, "chunk_size is ", settings.chunk_size);
  int64_t rounds = settings.rounding.rounds;
  TORCH_CHECK(0 <= rounds && rounds <= StateRounding::MAX_ROUNDS, "there are ", rounds, " rounds of Philox");
}

// lengths, read_slots, write_slots, starts: [batch], int64. Write slots may be -1 in steps of several tokens.
inline Rows check_all_rows(at::TensorList rows, int64_t batch, int64_t tokens, int64_t num_slots) {
  TORCH_CHECK(rows.size() == 4, "rows are lengths, read_slots, write_slots and starts");
  check_rows(rows[0], rows[1], batch, tokens, num_slots);
  check_rows(rows[0], rows[2], batch, tokens, num_slots, tokens > 1 ? -1 : 0);
  check_dense(rows[3], "starts", {batch}, at::kLong);
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
  check_weights(weights);
  check_shape(projected, "projected", {-1, -1, -1});
  check_mixer(projected, weights, state, settings);
  check_dense(state.ssm, "ssm_state", state.ssm.sizes(), state.ssm.scalar_type());
  check_dense(
      state.conv, "conv_state", {-1, -1, weights.conv_weight.size(2) - 1}, state.conv.scalar_type());
  int64_t batch = projected.size(0), tokens = projected.size(1);
  int64_t heads = state.ssm.size(1), head_dim = state.ssm.size(2), d_state = state.ssm.size(3);
  int64_t width = weights.conv_weight.size(-1), channels = weights.conv_weight.size(0);
  Mixer m{
      batch, tokens, heads, head_dim, d_state, width, channels,
      check_all_rows(rows, batch, tokens, state.ssm.size(0)), settings,
      as_floats(weights.dt_bias), decay_rates(weights.A_log), as_floats(weights.D)};

  at::Tensor y = empty({batch, tokens, m.inner()}, projected.options().dtype(at::kFloat));
  if (y.numel() == 0) return y;
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
