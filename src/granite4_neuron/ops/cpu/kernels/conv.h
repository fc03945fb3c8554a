// The Mamba-2 mixer's first half: the causal convolution of each sequence's inputs, SiLU, and the heads' step sizes.
#pragma once

#include "mixer.h"
#include "parallel.h"
#include "views.h"

namespace granite4_neuron {

// What the first half reads and writes.
//
// T is the dtype of inputs, weights and windows. A row of the batch is `row_stride` values of `inputs`; within it
// tokens are `token_stride` apart, each with the inputs of its channels and then those of its heads' step sizes.
template <typename T>
struct ConvViews {
  const T* inputs;
  int64_t row_stride, token_stride;
  const T* weight;   // [channels, width], the last tap multiplies the current token
  const T* bias;     // [channels], or null
  T* windows;        // [slots, channels, width - 1], oldest input first
  float* activated;  // [batch, tokens, channels]
  float* steps;      // [batch, tokens, heads]

  const T* token(int64_t row, int64_t t) const {
    return inputs + row * row_stride + t * token_stride;
  }
};

// The convolution's weights for vectors of channels.
struct Filter {
  std::vector<float> taps;  // [width, channels]
  std::vector<float> bias;  // [channels], zeros where the layer has none
};

// out[t] = silu(convolution) for one sequence's tokens begin to end.
//
// x: [tokens, channels]; before: the inputs before x, oldest first, [width - 1, channels]; out: [tokens, channels].
template <typename T>
inline void convolve(
    const Mixer& m, const Filter& filter, MatrixView<const T> x, const float* before, float* out, int64_t begin,
    int64_t end) {
  int64_t channels = m.channels, history = m.width - 1;
  std::vector<float> window(m.width * channels);  // row t % width is token t - history
  auto row_of = [&](int64_t token) { return window.data() + ((token + history) % m.width) * channels; };
  auto read = [&](int64_t token) {
    if (token < 0) {
      std::memcpy(row_of(token), before + (token + history) * channels, channels * sizeof(float));
    } else {
      to_float(x.row(token), row_of(token), channels);
    }
  };
  for (int64_t token = begin - history; token < begin; token++) read(token);
  for (int64_t token = begin; token < end; token++) {
    read(token);
    float* y = out + token * channels;
    int64_t c = 0;
    for (; c + LANES <= channels; c += LANES) {
      Vec total = Vec::loadu(&filter.bias[c]);
      for (int64_t tap = 0; tap < m.width; tap++)
        total = at::vec::fmadd(
            Vec::loadu(&filter.taps[tap * channels + c]), Vec::loadu(row_of(token - history + tap) + c), total);
      silu(total).store(y + c);
    }
    for (; c < channels; c++) {
      float total = filter.bias[c];
      for (int64_t tap = 0; tap < m.width; tap++)
        total += filter.taps[tap * channels + c] * row_of(token - history + tap)[c];
      y[c] = silu(total);
    }
  }
}

// The heads' step sizes of one token.
template <typename T>
inline void step_sizes(const Mixer& m, const T* raw, float* to) {
  const auto& limits = m.settings;
  to_float(raw, to, m.heads);
  int64_t head = 0;
  for (; head + LANES <= m.heads; head += LANES) {
    Vec step = softplus(Vec::loadu(to + head) + Vec::loadu(&m.dt_bias[head]));
    at::vec::clamp(step, Vec(limits.dt_low), Vec(limits.dt_high)).store(to + head);
  }
  for (; head < m.heads; head++)
    to[head] = std::clamp(softplus(to[head] + m.dt_bias[head]), limits.dt_low, limits.dt_high);
}

// [channels, columns] of any dtype to [columns, channels] in float32.
template <typename T>
inline void transpose_to_float(const T* from, int64_t channels, int64_t columns, float* to) {
  for (int64_t c = 0; c < channels; c++)
    for (int64_t i = 0; i < columns; i++) to[i * channels + c] = static_cast<float>(from[c * columns + i]);
}

// Convolution and step sizes of every sequence's tokens; windows advance in place.
template <typename T>
inline void convolve_tokens(const Mixer& m, const ConvViews<T>& views) {
  int64_t channels = m.channels, history = m.width - 1, window = channels * history;
  Filter filter{std::vector<float>(m.width * channels), std::vector<float>(channels)};
  transpose_to_float(views.weight, channels, m.width, filter.taps.data());
  if (views.bias != nullptr) to_float(views.bias, filter.bias.data(), channels);
  std::vector<float> before(m.batch * window);  // [batch, history, channels]
  for (int64_t row = 0; row < m.batch; row++)
    transpose_to_float(views.windows + m.rows.read_slots[row] * window, channels, history, &before[row * window]);
  // Blocks of tokens, of which each thread takes some.
  constexpr int64_t BLOCK = 32;
  int64_t blocks = (m.tokens + BLOCK - 1) / BLOCK;
  parallel_tasks(m.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / blocks, first = task % blocks * BLOCK, last = std::min(first + BLOCK, m.rows.lengths[row]);
      if (first >= last) continue;
      MatrixView<const T> x{views.token(row, 0), views.token_stride};
      float* out = views.activated + row * m.tokens * channels;
      convolve(m, filter, x, &before[row * window], out, first, last);
      for (int64_t token = first; token < last; token++)
        step_sizes(m, x.row(token) + channels, views.steps + (row * m.tokens + token) * m.heads);
    }
  });
  for (int64_t row = 0; row < m.batch; row++) {
    int64_t length = m.rows.lengths[row], slot = m.rows.write_slots[row];
    if (length == 0 || slot < 0) continue;
    T* to = views.windows + slot * window;
    for (int64_t h = 0; h < history; h++) {
      int64_t token = length - history + h;  // in this step, or before it where negative
      const T* here = views.token(row, token);
      const float* earlier = &before[row * window] + (token + history) * channels;
      for (int64_t c = 0; c < channels; c++)
        to[c * history + h] = token >= 0 ? here[c] : static_cast<T>(earlier[c]);
    }
  }
}

// Channels `begin` to `end` of one row's token: the convolution before its activation, and the row's next window. It
// may take the place of the one before.
template <typename T, int64_t HISTORY>
inline void advance_window(const Mixer& m, const ConvViews<T>& views, int64_t row, int64_t begin, int64_t end) {
  const T* x = views.token(row, 0);
  const T* from = views.windows + m.rows.read_slots[row] * m.channels * HISTORY;
  T* to = views.windows + m.rows.write_slots[row] * m.channels * HISTORY;
  float* out = views.activated + row * m.channels;
  for (int64_t c = begin; c < end; c++) {
    T window[HISTORY + 1];
    for (int64_t h = 0; h < HISTORY; h++) window[h] = from[c * HISTORY + h];
    window[HISTORY] = x[c];
    const T* taps = views.weight + c * (HISTORY + 1);
    float total = views.bias ? static_cast<float>(views.bias[c]) : 0.0f;
    for (int64_t tap = 0; tap <= HISTORY; tap++)
      total += static_cast<float>(taps[tap]) * static_cast<float>(window[tap]);
    out[c] = total;
    for (int64_t h = 0; h < HISTORY; h++) to[c * HISTORY + h] = window[h + 1];
  }
}

// As `convolve_tokens`, for one token of every sequence and a width of 2 to 4.
template <typename T>
inline void convolve_token(const Mixer& m, const ConvViews<T>& views) {
  constexpr int64_t BLOCK = 512;
  int64_t blocks = (m.channels + BLOCK - 1) / BLOCK;
  auto advance = m.width == 4 ? advance_window<T, 3> : m.width == 3 ? advance_window<T, 2> : advance_window<T, 1>;
  parallel_tasks(m.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / blocks, first = task % blocks * BLOCK, last = std::min(first + BLOCK, m.channels);
      if (m.rows.lengths[row] == 0) continue;
      advance(m, views, row, first, last);
      float* out = views.activated + row * m.channels;
      int64_t c = first;
      for (; c + LANES <= last; c += LANES) silu(Vec::loadu(out + c)).store(out + c);
      for (; c < last; c++) out[c] = silu(out[c]);
      if (first == 0) step_sizes(m, views.token(row, 0) + m.channels, views.steps + row * m.heads);
    }
  });
}

}  // namespace granite4_neuron
