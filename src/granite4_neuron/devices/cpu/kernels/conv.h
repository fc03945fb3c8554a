// The Mamba-2 mixer's first half: the causal convolution of each sequence's inputs, SiLU, and the heads' step sizes.
#pragma once

#include "mixer.h"
#include "packed.h"
#include "parallel.h"
#include "views.h"

namespace granite4_neuron {

// The inputs and outputs of the first half.
//
// T is the dtype of inputs and windows. Tokens are `token_stride` apart, each with the inputs of its channels and then
// those of its heads' step sizes.
template <typename T>
struct ConvViews {
  const T* inputs;
  int64_t token_stride;
  T* windows;        // [slots, channels, width - 1], oldest input first
  float* activated;  // [tokens, channels]
  float* steps;      // [tokens, heads]

  const T* token(int64_t number) const {
    return inputs + number * token_stride;
  }
};

// out = silu(convolution) of one token, channels `begin` to `end`; inputs(tap): the inputs that this tap multiplies,
// [channels]. Every path calls this, with the same channels in each vector.
template <typename Inputs>
inline void convolve_channels(const Mixer& m, const Inputs& inputs, float* out, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; c += LANES) {
    int64_t lanes = std::min(LANES, end - c);
    Vec total = Vec::loadu(&m.filter.bias[c], lanes);
    for (int64_t tap = 0; tap < m.width; tap++)
      total = at::vec::fmadd(
          Vec::loadu(&m.filter.taps[tap * m.channels + c], lanes), Vec::loadu(inputs(tap) + c, lanes), total);
    silu(total).store(out + c, lanes);
  }
}

// out[t] = silu(convolution) for one sequence's tokens begin to end.
//
// x: [tokens, channels]; before: the inputs before x, oldest first, [width - 1, channels]; out: [tokens, channels].
template <typename T>
inline void convolve(
    const Mixer& m, MatrixView<const T> x, const float* before, float* out, int64_t begin, int64_t end) {
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
    auto inputs = [&](int64_t tap) { return row_of(token - history + tap); };
    convolve_channels(m, inputs, out + token * channels, 0, channels);
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

// Convolution and step sizes of rows of any number of tokens; windows advance in place.
template <typename T>
inline void convolve_rows(const Mixer& m, const ConvViews<T>& views, const std::vector<int64_t>& rows) {
  int64_t channels = m.channels, history = m.width - 1, window = channels * history, count = rows.size();
  std::vector<float> before(count * window);  // [rows, history, channels]
  // Blocks of tokens, shared among threads; their rows are indices into `rows`.
  constexpr int64_t BLOCK = 32;
  std::vector<TokenBlock> blocks;
  for (int64_t i = 0; i < count; i++) {
    int64_t row = rows[i], length = m.rows.lengths[row];
    transpose_to_float(views.windows + m.rows.read_slots[row] * window, channels, history, &before[i * window]);
    for (int64_t first = 0; first < length; first += BLOCK)
      blocks.push_back({i, first, std::min(BLOCK, length - first)});
  }
  parallel_tasks(blocks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      auto [i, first, size] = blocks[task];
      int64_t offset = m.rows.offsets[rows[i]];
      MatrixView<const T> x{views.token(offset), views.token_stride};
      convolve(m, x, &before[i * window], views.activated + offset * channels, first, first + size);
      for (int64_t token = first; token < first + size; token++)
        step_sizes(m, x.row(token) + channels, views.steps + (offset + token) * m.heads);
    }
  });
  for (int64_t i = 0; i < count; i++) {
    int64_t row = rows[i], length = m.rows.lengths[row], slot = m.rows.write_slots[row];
    if (slot < 0) continue;
    T* to = views.windows + slot * window;
    for (int64_t h = 0; h < history; h++) {
      int64_t token = length - history + h;  // in this step, or before it where negative
      const T* here = views.token(m.rows.offsets[row] + token);
      const float* earlier = &before[i * window] + (token + history) * channels;
      for (int64_t c = 0; c < channels; c++)
        to[c * history + h] = token >= 0 ? here[c] : static_cast<T>(earlier[c]);
    }
  }
}

// The inputs of LANES channels of one row's token, and their next window, which may overwrite the previous one.
template <typename T, int64_t HISTORY>
struct TokenWindow {
  float inputs[HISTORY + 1][LANES];

  void advance(const T* x, const T* from, T* to, int64_t count) {
    for (int64_t c = 0; c < count; c++) {
      T window[HISTORY + 1];
      for (int64_t h = 0; h < HISTORY; h++) window[h] = from[c * HISTORY + h];
      window[HISTORY] = x[c];
      for (int64_t h = 0; h <= HISTORY; h++) inputs[h][c] = static_cast<float>(window[h]);
      for (int64_t h = 0; h < HISTORY; h++) to[c * HISTORY + h] = window[h + 1];
    }
  }
};

// As `convolve_rows`, for rows of one token with a window to write, and a width known to the compiler.
template <typename T, int64_t HISTORY>
inline void convolve_tokens(const Mixer& m, const ConvViews<T>& views, const std::vector<int64_t>& rows) {
  constexpr int64_t BLOCK = 512;
  int64_t blocks = (m.channels + BLOCK - 1) / BLOCK, size = m.channels * HISTORY;
  parallel_tasks(rows.size() * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t row = rows[task / blocks], first = task % blocks * BLOCK, last = std::min(first + BLOCK, m.channels);
      int64_t token = m.rows.offsets[row];
      const T *from = views.windows + m.rows.read_slots[row] * size, *x = views.token(token);
      T* to = views.windows + m.rows.write_slots[row] * size;
      for (int64_t c = first; c < last; c += LANES) {
        TokenWindow<T, HISTORY> window{};
        int64_t count = std::min(LANES, last - c);
        window.advance(x + c, from + c * HISTORY, to + c * HISTORY, count);
        auto inputs = [&](int64_t tap) { return window.inputs[tap] - c; };
        convolve_channels(m, inputs, views.activated + token * m.channels, c, c + count);
      }
      if (first == 0) step_sizes(m, x + m.channels, views.steps + token * m.heads);
    }
  });
}

// Convolution and step sizes of a step.
template <typename T>
inline void convolve_step(const Mixer& m, const ConvViews<T>& views) {
  bool has_tokens_kernel = 2 <= m.width && m.width <= 4;
  std::vector<int64_t> tokens, others;
  for (int64_t row = 0; row < m.num_rows; row++) {
    if (m.rows.lengths[row] == 0) continue;
    bool is_token = m.rows.lengths[row] == 1 && m.rows.write_slots[row] >= 0;
    (is_token && has_tokens_kernel ? tokens : others).push_back(row);
  }
  if (!others.empty()) convolve_rows(m, views, others);
  if (tokens.empty()) return;
  if (m.width == 4) return convolve_tokens<T, 3>(m, views, tokens);
  if (m.width == 3) return convolve_tokens<T, 2>(m, views, tokens);
  return convolve_tokens<T, 1>(m, views, tokens);
}

}  // namespace granite4_neuron
