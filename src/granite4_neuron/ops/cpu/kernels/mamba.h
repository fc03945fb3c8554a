// The Mamba-2 mixer between its projections: convolution, activation, recurrence; states are read and written in place.
#pragma once

#include "common.h"
#include "gemm.h"
#include "parallel.h"

namespace granite4_neuron {

// A layer's sizes, constants and rows; see `mamba_mixer`.
struct Mixer {
  int64_t batch, tokens, heads, head_dim, groups, d_state, width, channels;
  const float* taps;       // [width, channels]
  const float* conv_bias;  // [channels], or null
  const float *dt_bias, *A, *D;
  const int64_t *lengths, *read_slots, *slots;
  float dt_low, dt_high;
  int64_t heads_per_task;
};

// out[token] = silu(convolution) for one sequence's tokens begin to end.
//
// x: the inputs, `stride` apart; before: those before x[0], oldest first, [width - 1, channels]; out: [.., channels].
template <typename T>
inline void convolve(
    const Mixer& m, const T* x, int64_t stride, const float* before, float* out, int64_t begin, int64_t end) {
  int64_t channels = m.channels, history = m.width - 1;
  std::vector<float> window(m.width * channels);  // row t % width is token t - history
  auto row_of = [&](int64_t token) { return window.data() + ((token + history) % m.width) * channels; };
  auto read = [&](int64_t token) {
    if (token < 0) {
      std::memcpy(row_of(token), before + (token + history) * channels, channels * sizeof(float));
    } else {
      to_float(x + token * stride, row_of(token), channels);
    }
  };
  for (int64_t token = begin - history; token < begin; token++) read(token);
  for (int64_t token = begin; token < end; token++) {
    read(token);
    float* y = out + token * channels;
    int64_t c = 0;
    for (; c + LANES <= channels; c += LANES) {
      Vec total = m.conv_bias ? Vec::loadu(m.conv_bias + c) : Vec(0.0f);
      for (int64_t tap = 0; tap < m.width; tap++)
        total = at::vec::fmadd(
            Vec::loadu(m.taps + tap * channels + c), Vec::loadu(row_of(token - history + tap) + c), total);
      silu(total).store(y + c);
    }
    for (; c < channels; c++) {
      float total = m.conv_bias ? m.conv_bias[c] : 0.0f;
      for (int64_t tap = 0; tap < m.width; tap++)
        total += m.taps[tap * channels + c] * row_of(token - history + tap)[c];
      y[c] = silu(total);
    }
  }
}

// The heads' step sizes of one token.
template <typename T>
inline void step_sizes(const Mixer& m, const T* raw, float* to) {
  to_float(raw, to, m.heads);
  int64_t head = 0;
  for (; head + LANES <= m.heads; head += LANES) {
    Vec step = softplus(Vec::loadu(to + head) + Vec::loadu(m.dt_bias + head));
    at::vec::clamp(step, Vec(m.dt_low), Vec(m.dt_high)).store(to + head);
  }
  for (; head < m.heads; head++) to[head] = std::clamp(softplus(to[head] + m.dt_bias[head]), m.dt_low, m.dt_high);
}

// Convolution and step sizes of every sequence's tokens; windows advance in place.
//
// input: [batch, tokens, channels + heads], rows `row_stride` and tokens `stride` apart; windows: [slots, channels,
// width - 1]; activated: [batch, tokens, channels]; steps: [batch, tokens, heads].
template <typename T>
inline void convolve_tokens(
    const Mixer& m, const T* input, int64_t row_stride, int64_t stride, T* windows, float* activated, float* steps) {
  int64_t channels = m.channels, history = m.width - 1, window = channels * history;
  std::vector<float> before(m.batch * window);  // [batch, history, channels]
  for (int64_t row = 0; row < m.batch; row++) {
    const T* from = windows + m.read_slots[row] * window;
    for (int64_t c = 0; c < channels; c++)
      for (int64_t h = 0; h < history; h++)
        before[row * window + h * channels + c] = static_cast<float>(from[c * history + h]);
  }
  // Blocks of tokens, of which each thread takes some.
  constexpr int64_t BLOCK = 32;
  int64_t blocks = (m.tokens + BLOCK - 1) / BLOCK;
  at::parallel_for(0, m.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / blocks, first = task % blocks * BLOCK, last = std::min(first + BLOCK, m.lengths[row]);
      if (first >= last) continue;
      const T* x = input + row * row_stride;
      convolve(m, x, stride, &before[row * window], activated + row * m.tokens * channels, first, last);
      for (int64_t token = first; token < last; token++)
        step_sizes(m, x + token * stride + channels, steps + (row * m.tokens + token) * m.heads);
    }
  });
  for (int64_t row = 0; row < m.batch; row++) {
    int64_t length = m.lengths[row];
    if (length == 0) continue;
    T* to = windows + m.slots[row] * window;
    for (int64_t h = 0; h < history; h++) {
      int64_t token = length - history + h;  // in this step, or before it where negative
      const T* here = input + row * row_stride + token * stride;
      const float* earlier = &before[row * window] + (token + history) * channels;
      for (int64_t c = 0; c < channels; c++)
        to[c * history + h] = token >= 0 ? here[c] : static_cast<T>(earlier[c]);
    }
  }
}

// Channels `begin` to `end` of one token: out = convolution, before its activation; from, to: [channels, HISTORY], the
// window before and after, may be the same.
template <typename T, int64_t HISTORY>
inline void advance_window(
    const Mixer& m, const T* x, const T* from, T* to, float* out, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; c++) {
    T window[HISTORY + 1];
    for (int64_t h = 0; h < HISTORY; h++) window[h] = from[c * HISTORY + h];
    window[HISTORY] = x[c];
    float total = m.conv_bias ? m.conv_bias[c] : 0.0f;
    for (int64_t tap = 0; tap <= HISTORY; tap++)
      total += m.taps[tap * m.channels + c] * static_cast<float>(window[tap]);
    out[c] = total;
    for (int64_t h = 0; h < HISTORY; h++) to[c * HISTORY + h] = window[h + 1];
  }
}

// As `convolve_tokens`, for one token of every sequence and a width of 2 to 4.
template <typename T>
inline void convolve_token(
    const Mixer& m, const T* input, int64_t row_stride, T* windows, float* activated, float* steps) {
  constexpr int64_t BLOCK = 512;
  int64_t blocks = (m.channels + BLOCK - 1) / BLOCK, window = m.channels * (m.width - 1);
  auto advance = m.width == 4 ? advance_window<T, 3> : m.width == 3 ? advance_window<T, 2> : advance_window<T, 1>;
  parallel_tasks(m.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / blocks, first = task % blocks * BLOCK, last = std::min(first + BLOCK, m.channels);
      if (m.lengths[row] == 0) continue;
      const T* x = input + row * row_stride;
      float* out = activated + row * m.channels;
      advance(m, x, windows + m.read_slots[row] * window, windows + m.slots[row] * window, out, first, last);
      int64_t c = first;
      for (; c + LANES <= last; c += LANES) silu(Vec::loadu(out + c)).store(out + c);
      for (; c < last; c++) out[c] = silu(out[c]);
      if (first == 0) step_sizes(m, x + m.channels, steps + row * m.heads);
    }
  });
}

// state <- decay * state + scaled_x (outer) B for one head; y = state . C. state: [head_dim, d_state].
inline void update_state(
    const float* x, float dt, float decay, const float* B, const float* C, float D, const float* from, float* to,
    float* y, int64_t head_dim, int64_t d_state) {
  Vec keep(decay);
  for (int64_t p = 0; p < head_dim; p++) {
    float dt_x = dt * x[p];
    Vec add(dt_x), total(0.0f);
    const float* old = from + p * d_state;
    float* now = to + p * d_state;
    int64_t n = 0;
    for (; n + LANES <= d_state; n += LANES) {
      Vec value = at::vec::fmadd(keep, Vec::loadu(old + n), add * Vec::loadu(B + n));
      value.store(now + n);
      total = at::vec::fmadd(value, Vec::loadu(C + n), total);
    }
    float rest = 0.0f;
    for (; n < d_state; n++) {
      now[n] = decay * old[n] + dt_x * B[n];
      rest += now[n] * C[n];
    }
    y[p] = sum(total) + rest + D * x[p];
  }
}

// One token of every sequence. dt: [batch, heads], step sizes.
inline void decode(const Mixer& m, const float* xBC, const float* dt, float* ssm_state, float* y) {
  int64_t head_size = m.head_dim * m.d_state, inner = m.heads * m.head_dim;
  parallel_tasks(m.batch * m.heads, m.heads_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / m.heads, head = task % m.heads, group = head * m.groups / m.heads;
      if (m.lengths[row] == 0) continue;
      const float* x = xBC + row * m.channels;
      const float* B = x + inner + group * m.d_state;
      float step = dt[row * m.heads + head];
      const float* from = ssm_state + (m.read_slots[row] * m.heads + head) * head_size;
      float* to = ssm_state + (m.slots[row] * m.heads + head) * head_size;
      update_state(
          x + head * m.head_dim, step, std::exp(step * m.A[head]), B, B + m.groups * m.d_state, m.D[head], from, to,
          y + row * inner + head * m.head_dim, m.head_dim, m.d_state);
    }
  });
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// scores[i, j] = C_i . B_j for the tokens of one chunk and group; [CHUNK, CHUNK], what lies above the diagonal is junk.
template <int64_t CHUNK>
inline void chunk_scores(
    const float* B, const float* C, int64_t stride, int64_t length, int64_t d_state, float* scores,
    std::vector<float>& scratch) {
  scratch.resize(d_state * CHUNK);
  for (int64_t j = 0; j < CHUNK; j++)
    for (int64_t n = 0; n < d_state; n++) scratch[n * CHUNK + j] = j < length ? B[j * stride + n] : 0.0f;
  for (int64_t i = 0; i < length; i += GEMM_ROWS) {
    int64_t rows = std::min(GEMM_ROWS, length - i);
    int64_t columns = std::min(CHUNK, round_up(i + rows, LANES));
    gemm(rows, columns, d_state, C + i * stride, stride, 1, scratch.data(), CHUNK, scores + i * CHUNK, CHUNK, false);
  }
}

// One head of one sequence, chunk by chunk: Dao and Gu 2024, section 6; the equations are those of ops.ssd_quadratic.
//
// x, B, C: the first token's; tokens are `stride` apart. dt: tokens `dt_stride` apart. y: tokens `y_stride` apart.
// scores: of `chunk_scores`, chunk by chunk. from, to: [head_dim, d_state], may be the same.
//
// CHUNK: tokens that are scanned at once, a multiple of LANES. Their decay matrix and the state should stay in the nearest
// caches.
template <int64_t CHUNK>
struct HeadScan {
  int64_t head_dim, d_state, columns;
  // The state as [d_state, head_dim]: all products have the channels of the head in vectors. Columns are padded.
  std::vector<float> state, dt_x, out, decayed, log_decay, segment, to_end, chunk_end_x;

  HeadScan(int64_t head_dim, int64_t d_state)
      : head_dim(head_dim), d_state(d_state), columns(round_up(head_dim, LANES)), state(d_state * columns),
        dt_x(CHUNK * columns), out(CHUNK * columns), decayed(CHUNK * CHUNK), log_decay(CHUNK), segment(CHUNK),
        to_end(CHUNK), chunk_end_x(CHUNK * columns) {}

  void run(
      const float* x, const float* B, const float* C, int64_t stride, int64_t length, const float* dt,
      int64_t dt_stride, float A, float D, const float* scores, const float* from, float* to, float* y,
      int64_t y_stride) {
    for (int64_t p = 0; p < head_dim; p++)
      for (int64_t n = 0; n < d_state; n++) state[n * columns + p] = from[p * d_state + n];
    for (int64_t start = 0; start < length; start += CHUNK, scores += CHUNK * CHUNK) {
      chunk(
          x + start * stride, B + start * stride, C + start * stride, stride, std::min(CHUNK, length - start),
          dt + start * dt_stride, dt_stride, A, D, scores, y + start * y_stride, y_stride);
    }
    for (int64_t p = 0; p < head_dim; p++)
      for (int64_t n = 0; n < d_state; n++) to[p * d_state + n] = state[n * columns + p];
  }

 private:
  void chunk(
      const float* x, const float* B, const float* C, int64_t stride, int64_t length, const float* dt,
      int64_t dt_stride, float A, float D, const float* scores, float* y, int64_t y_stride) {
    for (int64_t i = 0; i < length; i++) {
      float step = dt[i * dt_stride];
      log_decay[i] = step * A;
      for (int64_t p = 0; p < head_dim; p++) dt_x[i * columns + p] = step * x[i * stride + p];
    }
    decay_scores(scores, length);

    // What the state gives: out_i = exp(a_1 + ... + a_i) C_i . S.
    gemm(length, columns, d_state, C, stride, 1, state.data(), columns, out.data(), columns, false);
    float since_start = 0.0f;
    for (int64_t i = 0; i < length; i++) {
      since_start += log_decay[i];
      Vec decay(std::exp(since_start));
      float* row = &out[i * columns];
      for (int64_t p = 0; p < columns; p += LANES) (Vec::loadu(row + p) * decay).store(row + p);
    }
    // What the chunk's own tokens give, of which token i sees i + 1.
    for (int64_t i = 0; i < length; i += GEMM_ROWS) {
      int64_t rows = std::min(GEMM_ROWS, length - i);
      gemm(
          rows, columns, i + rows, &decayed[i * CHUNK], CHUNK, 1, dt_x.data(), columns, &out[i * columns], columns,
          true);
    }
    for (int64_t i = 0; i < length; i++)
      for (int64_t p = 0; p < head_dim; p++) y[i * y_stride + p] = out[i * columns + p] + D * x[i * stride + p];

    // S <- exp(a_1 + ... + a_L) S + sum_j exp(a_{j+1} + ... + a_L) B_j (outer) dt_j x_j.
    float until_end = 0.0f;
    for (int64_t j = length - 1; j >= 0; j--) {
      Vec decay(std::exp(until_end));
      for (int64_t p = 0; p < columns; p += LANES)
        (Vec::loadu(&dt_x[j * columns + p]) * decay).store(&chunk_end_x[j * columns + p]);
      until_end += log_decay[j];
    }
    Vec keep(std::exp(until_end));
    for (int64_t n = 0; n < d_state * columns; n += LANES) (Vec::loadu(&state[n]) * keep).store(&state[n]);
    gemm(d_state, columns, length, B, 1, stride, chunk_end_x.data(), columns, state.data(), columns, true);
  }

  // decayed[i, j] = scores[i, j] exp(a_{j+1} + ... + a_i) for j <= i, and 0 above the diagonal, as far as
  // tiles of the product that follows reach beyond it.
  //
  // Each exponent is summed from its own terms: row i's are row i - 1's plus a_i. No exponent is positive.
  void decay_scores(const float* scores, int64_t length) {
    std::fill(segment.begin(), segment.end(), 0.0f);
    for (int64_t i = 0; i < length; i++) {
      for (int64_t j = 0; j < std::min(CHUNK, i + GEMM_ROWS); j += LANES) {
        Vec column = Vec::arange(static_cast<float>(j), 1);
        Vec sum = Vec::blendv(Vec(0.0f), Vec::loadu(&segment[j]) + Vec(log_decay[i]), column < Vec(i));
        sum.store(&segment[j]);
        Vec value = sum.exp_u20() * Vec::loadu(scores + i * CHUNK + j);
        Vec::blendv(Vec(0.0f), value, column <= Vec(i)).store(&decayed[i * CHUNK + j]);
      }
    }
  }
};

// Any number of tokens of every sequence. dt: [batch, tokens, heads], step sizes.
template <int64_t CHUNK>
inline void scan(const Mixer& m, const float* xBC, const float* dt, float* ssm_state, float* y) {
  int64_t chunks = (m.tokens + CHUNK - 1) / CHUNK, inner = m.heads * m.head_dim, block = CHUNK * CHUNK;
  std::vector<float> scores(m.batch * m.groups * chunks * block);
  at::parallel_for(0, m.batch * m.groups * chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / (m.groups * chunks), group = task / chunks % m.groups, start = task % chunks * CHUNK;
      if (start >= m.lengths[row]) continue;
      const float* B = xBC + (row * m.tokens + start) * m.channels + inner + group * m.d_state;
      chunk_scores<CHUNK>(
          B, B + m.groups * m.d_state, m.channels, std::min(CHUNK, m.lengths[row] - start), m.d_state,
          &scores[task * block], scratch);
    }
  });
  at::parallel_for(0, m.batch * m.heads, 1, [&](int64_t begin, int64_t end) {
    HeadScan<CHUNK> head_scan(m.head_dim, m.d_state);
    int64_t head_size = m.head_dim * m.d_state;
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / m.heads, head = task % m.heads, group = head * m.groups / m.heads;
      if (m.lengths[row] == 0) continue;
      const float* x = xBC + row * m.tokens * m.channels;
      const float* B = x + inner + group * m.d_state;
      head_scan.run(
          x + head * m.head_dim, B, B + m.groups * m.d_state, m.channels, m.lengths[row],
          dt + row * m.tokens * m.heads + head, m.heads, m.A[head], m.D[head],
          &scores[(row * m.groups + group) * chunks * block],
          ssm_state + (m.read_slots[row] * m.heads + head) * head_size,
          ssm_state + (m.slots[row] * m.heads + head) * head_size, y + row * m.tokens * inner + head * m.head_dim,
          inner);
    }
  });
}

using Recurrence = void (*)(const Mixer&, const float*, const float*, float*, float*);

inline Recurrence recurrence(int64_t tokens, int64_t chunk_size) {
  if (tokens == 1) return decode;
  if (chunk_size == 32) return scan<32>;
  if (chunk_size == 64) return scan<64>;
  TORCH_CHECK(chunk_size == 128, "chunk_size is ", chunk_size, "; it must be 32, 64 or 128");
  return scan<128>;
}

// As ops.cpu.mamba_mixer, which is the Python side. Real tokens only are computed; y of padding is 0.
//
// projected: [batch, tokens, conv_dim + num_heads], tokens at any distance; conv_taps: [d_conv, conv_dim];
// conv_state: [slots, conv_dim, d_conv - 1]; ssm_state: [slots, num_heads, head_dim, d_state]; A, D, dt_bias:
// [num_heads]; all constants and ssm_state are float32; chunk_size: tokens that are scanned at once; heads_per_task:
// states that a thread updates at a time. Returns y, [batch, tokens, num_heads * head_dim] in float32.
inline at::Tensor mamba_mixer(
    const at::Tensor& projected, const at::Tensor& conv_taps, const std::optional<at::Tensor>& conv_bias,
    const at::Tensor& dt_bias, const at::Tensor& A, const at::Tensor& D, at::Tensor conv_state, at::Tensor ssm_state,
    const at::Tensor& lengths, const at::Tensor& read_slots, const at::Tensor& slots, int64_t n_groups, double dt_low,
    double dt_high, int64_t chunk_size, int64_t heads_per_task) {
  check_last_axis(projected, "projected");
  for (const at::Tensor* constant : {&conv_taps, &dt_bias, &A, &D})
    TORCH_CHECK(constant->is_contiguous() && constant->scalar_type() == at::kFloat);
  TORCH_CHECK(conv_state.is_contiguous() && ssm_state.is_contiguous() && ssm_state.scalar_type() == at::kFloat);
  TORCH_CHECK(conv_state.scalar_type() == projected.scalar_type());
  check_rows(lengths, read_slots, projected.size(1), ssm_state.size(0));
  check_rows(lengths, slots, projected.size(1), ssm_state.size(0));
  Recurrence recur = recurrence(projected.size(1), chunk_size);
  TORCH_CHECK(heads_per_task > 0, "heads_per_task is ", heads_per_task);
  int64_t batch = projected.size(0), tokens = projected.size(1), channels = conv_taps.size(1);
  int64_t width = conv_taps.size(0), heads = ssm_state.size(1), history = width - 1;
  TORCH_CHECK(projected.size(2) == channels + heads && conv_state.size(1) == channels && conv_state.size(2) == history);
  Mixer m{
      batch,
      tokens,
      heads,
      ssm_state.size(2),
      n_groups,
      ssm_state.size(3),
      width,
      channels,
      conv_taps.const_data_ptr<float>(),
      conv_bias.has_value() ? conv_bias->const_data_ptr<float>() : nullptr,
      dt_bias.const_data_ptr<float>(),
      A.const_data_ptr<float>(),
      D.const_data_ptr<float>(),
      lengths.const_data_ptr<int64_t>(),
      read_slots.const_data_ptr<int64_t>(),
      slots.const_data_ptr<int64_t>(),
      static_cast<float>(dt_low),
      static_cast<float>(dt_high),
      heads_per_task};

  at::Tensor y = at::empty({batch, tokens, heads * m.head_dim}, projected.options().dtype(at::kFloat));
  for (int64_t row = 0; row < batch; row++) {
    float* of_row = y.mutable_data_ptr<float>() + row * y.stride(0);
    std::fill(of_row + m.lengths[row] * y.stride(1), of_row + y.stride(0), 0.0f);
  }
  at::Tensor xBC = at::empty({batch, tokens, channels}, y.options());
  at::Tensor dt = at::empty({batch, tokens, heads}, y.options());
  float* activated = xBC.mutable_data_ptr<float>();
  float* steps = dt.mutable_data_ptr<float>();
  GRANITE4_DISPATCH(projected.scalar_type(), "mamba_mixer", [&] {
    const auto* input = projected.const_data_ptr<scalar_t>();
    auto* windows = conv_state.mutable_data_ptr<scalar_t>();
    if (tokens == 1 && 2 <= width && width <= 4) {
      convolve_token(m, input, projected.stride(0), windows, activated, steps);
    } else {
      convolve_tokens(m, input, projected.stride(0), projected.stride(1), windows, activated, steps);
    }
  });
  recur(m, activated, steps, ssm_state.mutable_data_ptr<float>(), y.mutable_data_ptr<float>());
  return y;
}

}  // namespace granite4_neuron
