// The Mamba-2 mixer's second half: the recurrence over each head's state, token by token.
//
// One token after another is as fast as chunks of matrix products (Dao and Gu 2024, section 6) where a part of the state
// stays in registers while many tokens pass. And it is the same arithmetic in the same order however a sequence is cut
// into steps: prompts, verified tokens and single tokens give the same results bit by bit.
#pragma once

#include "mixer.h"
#include "parallel.h"
#include "views.h"

namespace granite4_neuron {

// What the second half reads and writes: inputs after their activation, step sizes, states and results.
struct ScanViews {
  const float* xBC;  // [batch, tokens, channels], with channels = inner + 2 * groups * d_state
  const float* dt;   // [batch, tokens, heads]
  float* ssm_state;  // [slots, heads, head_dim, d_state]
  float* y;          // [batch, tokens, inner]; null where nobody asks for it
};

// One head's part of one sequence's tokens: a row each of x, B, C and y, and a step size.
struct HeadTokens {
  int64_t length;
  MatrixView<const float> x;     // [length, head_dim]
  MatrixView<const float> B, C;  // [length, d_state]
  MatrixView<const float> dt;    // [length, 1]
  MatrixView<float> y;           // [length, head_dim], or null
  float A, D;

  // `count` tokens at most, from `start` on.
  HeadTokens part(int64_t start, int64_t count) const {
    return {std::min(count, length - start), x.from_row(start), B.from_row(start), C.from_row(start),
            dt.from_row(start), y.data == nullptr ? y : y.from_row(start), A, D};
  }
};

inline HeadTokens head_tokens(const Mixer& m, const ScanViews& views, int64_t row, int64_t head) {
  int64_t first = row * m.tokens, groups_width = m.settings.groups * m.d_state;
  const float* x = views.xBC + first * m.channels;
  const float* B = x + m.inner() + m.group_of(head) * m.d_state;
  return {m.rows.lengths[row],
          {x + head * m.head_dim, m.channels},
          {B, m.channels},
          {B + groups_width, m.channels},
          {views.dt + first * m.heads + head, m.heads},
          {views.y == nullptr ? nullptr : views.y + first * m.inner() + head * m.head_dim, m.inner()},
          m.A[head],
          m.D[head]};
}

// A head's state before and after a call, each [head_dim, d_state]; they may be the same.
struct HeadState {
  const float* from;
  float* to;
};

// state <- decay * state + dt_x B for LANES values of one channel, and their part of its y: total <- total + state C.
inline Vec advance(Vec state, Vec decay, Vec dt_x, Vec B, Vec C, Vec& total) {
  Vec now = at::vec::fmadd(decay, state, dt_x * B);
  total = at::vec::fmadd(now, C, total);
  return now;
}

inline float output(Vec total, float D, float x) {
  return std::fma(D, x, sum(total));
}

// Some tokens of one head, for channels `p` to p + CHANNELS and a d_state of VECTORS vectors, whose state is kept in
// registers. decays: exp(dt A) of the tokens.
template <int CHANNELS, int VECTORS>
inline void scan_in_registers(const HeadTokens& tokens, const float* decays, HeadState state, int64_t p) {
  constexpr int64_t SIZE = VECTORS * LANES;
  Vec now[CHANNELS][VECTORS];
#pragma GCC unroll 2
  for (int c = 0; c < CHANNELS; c++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) now[c][v] = Vec::loadu(state.from + (p + c) * SIZE + v * LANES);
  for (int64_t t = 0; t < tokens.length; t++) {
    const float *B = tokens.B.row(t), *C = tokens.C.row(t), *x = tokens.x.row(t) + p;
    float dt = *tokens.dt.row(t);
    Vec decay(decays[t]), totals[CHANNELS];
#pragma GCC unroll 2
    for (int c = 0; c < CHANNELS; c++) {
      totals[c] = Vec(0.0f);
      Vec dt_x(dt * x[c]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++)
        now[c][v] = advance(now[c][v], decay, dt_x, Vec::loadu(B + v * LANES), Vec::loadu(C + v * LANES), totals[c]);
    }
    if (tokens.y.data == nullptr) continue;
#pragma GCC unroll 2
    for (int c = 0; c < CHANNELS; c++) tokens.y.row(t)[p + c] = output(totals[c], tokens.D, x[c]);
  }
#pragma GCC unroll 2
  for (int c = 0; c < CHANNELS; c++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) now[c][v].store(state.to + (p + c) * SIZE + v * LANES);
}

// The same for one channel and any d_state, with the state in memory.
inline void scan_in_memory(
    const HeadTokens& tokens, const float* decays, HeadState state, int64_t p, int64_t d_state) {
  const float* old = state.from + p * d_state;
  float* now = state.to + p * d_state;
  for (int64_t t = 0; t < tokens.length; t++, old = now) {
    const float *B = tokens.B.row(t), *C = tokens.C.row(t);
    float x = tokens.x.row(t)[p];
    Vec decay(decays[t]), dt_x(*tokens.dt.row(t) * x), total(0.0f);
    int64_t n = 0;
    for (; n + LANES <= d_state; n += LANES)
      advance(Vec::loadu(old + n), decay, dt_x, Vec::loadu(B + n), Vec::loadu(C + n), total).store(now + n);
    if (n < d_state) {
      int64_t rest = d_state - n;
      advance(Vec::loadu(old + n, rest), decay, dt_x, Vec::loadu(B + n, rest), Vec::loadu(C + n, rest), total)
          .store(now + n, rest);
    }
    if (tokens.y.data != nullptr) tokens.y.row(t)[p] = output(total, tokens.D, x);
  }
}

// All tokens of one head of one sequence.
//
// block: tokens that pass through a part of the state at a time; their B and C should stay in the nearest cache.
inline void scan_head(const HeadTokens& tokens, HeadState state, int64_t head_dim, int64_t d_state, int64_t block) {
  constexpr int CHANNELS = 2, VECTORS = 8;
  float decays[MAX_SCAN_BLOCK];
  for (int64_t start = 0; start < tokens.length; start += block) {
    HeadTokens some = tokens.part(start, block);
    for (int64_t t = 0; t < some.length; t++) decays[t] = std::exp(*some.dt.row(t) * some.A);
    int64_t p = 0;
    if (LANES == 16 && d_state == VECTORS * LANES)
      for (; p + CHANNELS <= head_dim; p += CHANNELS) scan_in_registers<CHANNELS, VECTORS>(some, decays, state, p);
    for (; p < head_dim; p++) scan_in_memory(some, decays, state, p, d_state);
    state.from = state.to;
  }
}

// Any number of tokens of every sequence.
inline void scan(const Mixer& m, const ScanViews& views) {
  int64_t size = m.head_dim * m.d_state, grain = m.tokens == 1 ? m.settings.heads_per_task : 1;
  parallel_tasks(m.batch * m.heads, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> unwritten;  // the state of a step that leaves it as it is
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / m.heads, head = task % m.heads, slot = m.rows.write_slots[row];
      if (m.rows.lengths[row] == 0) continue;
      if (slot < 0) unwritten.resize(size);
      HeadState state{
          views.ssm_state + (m.rows.read_slots[row] * m.heads + head) * size,
          slot < 0 ? unwritten.data() : views.ssm_state + (slot * m.heads + head) * size};
      scan_head(head_tokens(m, views, row, head), state, m.head_dim, m.d_state, m.settings.chunk_size);
    }
  });
}

}  // namespace granite4_neuron
