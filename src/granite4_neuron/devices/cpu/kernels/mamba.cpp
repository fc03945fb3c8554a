// The Mamba-2 mixer, over states in slots and over states in pages.
#include "mamba.h"

#include "buffers.h"
#include "conv.h"
#include "paged.h"
#include "profile.h"
#include "scan.h"

namespace granite4_neuron {

// projected: [..., channels + heads].
inline void check_call(const MambaMixer& mixer, const at::Tensor& projected, const MixerState& state) {
  int64_t channels = mixer.channels, heads = mixer.heads, groups = mixer.settings.groups;
  check_last_axis(projected, "projected");
  TORCH_CHECK(
      projected.size(-1) == channels + heads, "projected has ", projected.size(-1), " values of a token, for ",
      channels, " channels and ", heads, " heads");
  TORCH_CHECK(
      projected.scalar_type() == mixer.weights.conv_weight.scalar_type(), "projected and conv_weight differ in dtype");
  TORCH_CHECK(projected.scalar_type() == state.conv.scalar_type(), "projected and conv_state differ in dtype");
  check_shape(state.ssm, "ssm_state", {-1, heads, -1, -1});
  at::ScalarType ssm = state.ssm.scalar_type();
  TORCH_CHECK(
      ssm == at::kFloat || ssm == at::kHalf || ssm == at::kBFloat16, "ssm_state is ", ssm,
      " and should be Float, Half or BFloat16");
  check_shape(state.conv, "conv_state", {state.ssm.size(0), channels, -1});
  int64_t head_dim = state.ssm.size(2), d_state = state.ssm.size(3);
  TORCH_CHECK(head_dim > 0 && d_state > 0, "ssm_state has the shape ", state.ssm.sizes(), ", with an axis of size 0");
  TORCH_CHECK(
      channels == heads * head_dim + 2 * groups * d_state, "there are ", channels, " channels, which are not ", heads,
      " heads of ", head_dim, " and twice ", groups, " groups of ", d_state);
}

inline Rows check_slot_rows(const SlotRows& rows, int64_t tokens, int64_t num_slots) {
  check_packed(rows.tokens, tokens);
  check_slots(rows.read_slots, "read_slots", rows.tokens.count(), num_slots);
  check_slots(rows.write_slots, "write_slots", rows.tokens.count(), num_slots, -1);
  check_dense(rows.starts, "starts", {rows.tokens.count()}, at::kLong);
  auto numbers = [](const at::Tensor& tensor) { return tensor.const_data_ptr<int64_t>(); };
  return {numbers(rows.tokens.offsets), numbers(rows.tokens.lengths), numbers(rows.read_slots),
          numbers(rows.write_slots), numbers(rows.starts)};
}

at::Tensor mamba_mixer(
    const MambaMixer& mixer, const at::Tensor& projected, const MixerState& state, const SlotRows& rows) {
  check_shape(projected, "projected", {-1, -1});
  check_call(mixer, projected, state);
  check_dense(state.ssm, "ssm_state", state.ssm.sizes(), state.ssm.scalar_type());
  check_dense(state.conv, "conv_state", {-1, -1, mixer.width - 1}, state.conv.scalar_type());
  int64_t tokens = projected.size(0), heads = mixer.heads, head_dim = state.ssm.size(2), d_state = state.ssm.size(3);
  int64_t width = mixer.width, channels = mixer.channels;
  Rows checked = check_slot_rows(rows, tokens, state.ssm.size(0));
  Mixer m{rows.tokens.count(), rows.tokens.longest(), heads, head_dim, d_state, width, channels, checked,
          mixer.settings, mixer.dt_bias, mixer.A, mixer.D, mixer.filter};

  at::Tensor y = empty({tokens, m.inner()}, projected.options().dtype(at::kFloat));
  if (rows.tokens.real_tokens() < tokens) std::fill_n(y.mutable_data_ptr<float>(), y.numel(), 0.0f);
  at::Tensor xBC = empty({tokens, channels}, y.options()), dt = empty({tokens, heads}, y.options());
  GRANITE4_DISPATCH(projected.scalar_type(), "mamba_mixer", [&] {
    ConvViews<scalar_t> views{
        projected.const_data_ptr<scalar_t>(),
        projected.stride(0),
        state.conv.mutable_data_ptr<scalar_t>(),
        xBC.mutable_data_ptr<float>(),
        dt.mutable_data_ptr<float>()};
    PartOfStep part(Part::convolution);
    convolve_step(m, views);
  });
  PartOfStep part(Part::scan);
  GRANITE4_DISPATCH(state.ssm.scalar_type(), "mamba_mixer", [&] {
    scan<scalar_t>(
        m, {xBC.const_data_ptr<float>(), dt.const_data_ptr<float>(), state.ssm.mutable_data_ptr<scalar_t>(),
            y.mutable_data_ptr<float>()});
  });
  return y;
}

at::Tensor paged_mamba_mixer(
    const MambaMixer& mixer, const at::Tensor& projected, const MixerState& state, const PageRows& page_rows) {
  check_shape(projected, "projected", {-1, -1});
  check_call(mixer, projected, state);
  int64_t tokens = projected.size(0), pages = state.ssm.size(0);
  int64_t heads = mixer.heads, head_dim = state.ssm.size(2), d_state = state.ssm.size(3);
  int64_t width = mixer.width, channels = mixer.channels;
  TORCH_CHECK(state.ssm.scalar_type() == at::kFloat, "ssm_state is ", state.ssm.scalar_type(), " and should be Float");
  TORCH_CHECK(pages == 0 || state.ssm[0].is_contiguous(), "a page of ssm_state must be contiguous");
  PagedRows rows = check_page_rows(page_rows, tokens, pages);
  int64_t columns = width - 1 + (rows.accepted == nullptr ? 0 : rows.columns - 1);
  TORCH_CHECK(
      state.conv.size(2) >= columns, "conv_state has ", state.conv.size(2),
      " columns where ", columns, " are needed");

  // One row that has the tokens of all sequences.
  const int64_t first = 0;
  Mixer m{1, tokens, heads, head_dim, d_state, width, channels, {&first, &tokens, nullptr, nullptr, nullptr},
          mixer.settings, mixer.dt_bias, mixer.A, mixer.D, mixer.filter};
  at::Tensor y = empty({tokens, m.inner()}, projected.options().dtype(at::kFloat));
  std::fill_n(y.mutable_data_ptr<float>(), y.numel(), 0.0f);  // the result for padding
  at::Tensor xBC = empty({tokens, channels}, y.options()), dt = empty({tokens, heads}, y.options());
  GRANITE4_DISPATCH(projected.scalar_type(), "paged_mamba_mixer", [&] {
    ConvViews<scalar_t> views{
        projected.const_data_ptr<scalar_t>(),
        projected.stride(0),
        nullptr,
        xBC.mutable_data_ptr<float>(),
        dt.mutable_data_ptr<float>()};
    PagedWindows<scalar_t> windows{
        state.conv.mutable_data_ptr<scalar_t>(), state.conv.stride(0), state.conv.stride(1), state.conv.stride(2)};
    PartOfStep part(Part::convolution);
    constexpr int64_t BLOCK = 512;
    int64_t blocks = (channels + BLOCK - 1) / BLOCK;
    parallel_tasks(rows.sequences * blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; task++) {
        int64_t row = task / blocks, first = task % blocks * BLOCK;
        if (rows.is_padding(row)) continue;
        convolve_paged(m, views, windows, rows, row, first, std::min(first + BLOCK, channels));
        for (int64_t token = rows.starts[row]; first == 0 && token < rows.starts[row + 1]; token++)
          step_sizes(m, views.token(token) + channels, views.steps + token * heads);
      }
    });
  });
  PartOfStep part(Part::scan);
  ScanViews<float> views{xBC.const_data_ptr<float>(), dt.const_data_ptr<float>(), nullptr, y.mutable_data_ptr<float>()};
  PagedStates states{state.ssm.mutable_data_ptr<float>(), state.ssm.stride(0)};
  parallel_tasks(rows.sequences * heads, mixer.settings.heads_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / heads, head = task % heads;
      if (!rows.is_padding(row)) advance_paged(m, head_tokens(m, views, 0, head), states, rows, row, head);
    }
  });
  return y;
}

}  // namespace granite4_neuron
