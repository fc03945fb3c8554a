// Rotary positions.
#pragma once

#include "common.h"

namespace granite4_neuron {

struct RotaryTables {
  at::Tensor cos, sin;  // [batch, tokens, head_dim / 2], float32
};

// As ops.apply_rotary, in place. x: [batch, tokens, heads, head_dim].
void apply_rotary(at::Tensor x, const RotaryTables& tables);

}  // namespace granite4_neuron
