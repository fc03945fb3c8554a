// The Mamba-2 mixer between its projections: convolution and recurrence; states are read and written in place.
#pragma once

#include "mixer.h"
#include "packed.h"

namespace granite4_neuron {

// The rows of a step over states in slots: their tokens, and [rows], int64: the slot that is read; the slot that is
// written, or -1 for none; the position of the first token.
struct SlotRows {
  PackedRows tokens;
  at::Tensor read_slots, write_slots, starts;
};

// `MambaMixer.step` of devices/cpu/layers.py. Only real tokens are computed; y is 0 for padding.
//
// projected: [tokens, channels + heads], tokens at any distance. Returns y, [tokens, heads * head_dim] in float32.
at::Tensor mamba_mixer(
    const MambaMixer& mixer, const at::Tensor& projected, const MixerState& state, const SlotRows& rows);

// The rows of a step over states in pages, as `PagedRows` has them; int32.
struct PageRows {
  at::Tensor starts, pages;
  std::optional<at::Tensor> accepted;
};

// `MambaMixer.step_paged` of devices/cpu/layers.py.
at::Tensor paged_mamba_mixer(
    const MambaMixer& mixer, const at::Tensor& projected, const MixerState& state, const PageRows& page_rows);

}  // namespace granite4_neuron
