// The Mamba-2 mixer's second half: the recurrence over each head's state, token by token.
//
// One token after another is as fast as chunks of matrix products (Dao and Gu 2024, section 6) where a part of the
// state stays in registers while many tokens pass. And it is the same arithmetic in the same order however a sequence
// is cut into steps: prompts, verified tokens and single tokens give the same results bit by bit.
#pragma once

#include "mixer.h"
#include "parallel.h"
#include "views.h"

namespace granite4_neuron {

// What the second half reads and writes: inputs after their activation, step sizes, states and results.
//
// S is the dtype of states, which are computed in float32 and rounded where they are stored.
template <typename S>
struct ScanViews {
  const float* xBC;  // [batch, tokens, channels], with channels = inner + 2 * groups * d_state
  const float* dt;   // [batch, tokens, heads]
  S* ssm_state;      // [slots, heads, head_dim, d_state]
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

template <typename S>
inline HeadTokens head_tokens(const Mixer& m, const ScanViews<S>& views, int64_t row, int64_t head) {
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
template <typename S>
struct HeadState {
  const S* from;
  S* to;
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
inline void scan_in_registers(const HeadTokens& tokens, const float* decays, HeadState<float> state, int64_t p) {
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
    const HeadTokens& tokens, const float* decays, HeadState<float> state, int64_t p, int64_t d_state) {
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
inline void scan_head(
    const HeadTokens& tokens, HeadState<float> state, int64_t head_dim, int64_t d_state, int64_t block) {
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

// One token for rows p to p + ROWS - 1 of a state in a reduced dtype, in the arithmetic and the order of `scan_head`.
template <int ROWS, typename S>
inline void update_rows(
    const HeadTokens& token, HeadState<S> state, int64_t p, int64_t d_state, float decay, StateRounding& rounding) {
  const float *x = token.x.data + p, *B = token.B.data, *C = token.C.data;
  const S* old = state.from + p * d_state;
  S* now = state.to + p * d_state;
  Vec totals[ROWS], dt_x[ROWS], keep(decay);
  int64_t shared = p % SHARED_ROWS;
  for (int r = 0; r < ROWS; r++) {
    dt_x[r] = Vec(*token.dt.data * x[r]);
    totals[r] = Vec(0.0f);
  }
  int64_t n = 0;
  for (; n + PAIR <= d_state; n += PAIR) {
    Vec first_B = Vec::loadu(B + n), second_B = Vec::loadu(B + n + LANES);
    Vec first_C = Vec::loadu(C + n), second_C = Vec::loadu(C + n + LANES);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      auto [first, second] = load_pair(old + r * d_state + n);
      first = advance(first, keep, dt_x[r], first_B, first_C, totals[r]);
      second = advance(second, keep, dt_x[r], second_B, second_C, totals[r]);
      rounding.store(now + r * d_state + n, shared + r, n, first, second);
    }
  }
  for (; n < d_state; n += LANES) {
    int64_t rest = std::min(LANES, d_state - n);
    float values[LANES] = {};
    for (int r = 0; r < ROWS; r++) {
      to_float(old + r * d_state + n, values, rest);
      Vec value = Vec::loadu(values, rest);
      advance(value, keep, dt_x[r], Vec::loadu(B + n, rest), Vec::loadu(C + n, rest), totals[r]).store(values, rest);
      for (int64_t i = 0; i < rest; i++) rounding.store_one(now + r * d_state + n + i, shared + r, n + i, values[i]);
    }
  }
  if (token.y.data == nullptr) return;
  for (int r = 0; r < ROWS; r++) token.y.data[p + r] = output(totals[r], token.D, x[r]);
}

// One head's first token, for a state in a reduced dtype. rounding: of the head's sequence at this token.
template <typename S>
inline void update_state(
    const HeadTokens& token, HeadState<S> state, const Mixer& m, int64_t head, StateRounding rounding) {
  float decay = std::exp(*token.dt.data * token.A);
  auto update = [&]<int ROWS>(int64_t p) {
    rounding.start_rows(head, p);
    update_rows<ROWS>(token, state, p, m.d_state, decay, rounding);
  };
  int64_t p = 0;
  for (; p + SHARED_ROWS <= m.head_dim; p += SHARED_ROWS) update.template operator()<SHARED_ROWS>(p);
  for (; p < m.head_dim; p++) update.template operator()<1>(p);
}

// A head's state, [head_dim, d_state] in float32, rounded to a reduced dtype.
template <typename S>
inline void round_state(const float* values, S* rounded, const Mixer& m, int64_t head, StateRounding rounding) {
  for (int64_t p = 0; p < m.head_dim; p++, values += m.d_state, rounded += m.d_state) {
    int64_t shared = p % SHARED_ROWS, n = 0;
    if (shared == 0) rounding.start_rows(head, p);
    for (; n + PAIR <= m.d_state; n += PAIR)
      rounding.store(rounded + n, shared, n, Vec::loadu(values + n), Vec::loadu(values + n + LANES));
    for (; n < m.d_state; n++) rounding.store_one(rounded + n, shared, n, values[n]);
  }
}

// A state in a reduced dtype is rounded where its sequence has a multiple of chunk_size tokens, and where a step ends:
// so it does not matter at which of these places a prompt is cut. So many tokens between two such places are rounded
// one by one, as in decode: tokens that are verified together give what they give alone.
constexpr int64_t ROUNDED_ONE_BY_ONE = 16;

// All tokens of one head of one sequence, for a state in a reduced dtype.
template <typename S>
inline void scan_rounded(const Mixer& m, const HeadTokens& tokens, HeadState<S> state, int64_t row, int64_t head) {
  int64_t begin = m.rows.starts[row], chunk = m.settings.chunk_size;
  auto rounding_after = [&](int64_t count) {
    return StateRounding(m.settings.rounding, begin + count - 1, m.head_dim, m.d_state);
  };
  std::vector<float> values;
  for (int64_t start = 0, end = 0; start < tokens.length; start = end, state.from = state.to) {
    end = std::min(tokens.length, start + chunk - (begin + start) % chunk);
    if (end - start <= ROUNDED_ONE_BY_ONE) {
      for (int64_t t = start; t < end; t++, state.from = state.to)
        update_state(tokens.part(t, 1), state, m, head, rounding_after(t + 1));
      continue;
    }
    values.resize(m.head_dim * m.d_state);
    to_float(state.from, values.data(), values.size());
    scan_head(tokens.part(start, end - start), {values.data(), values.data()}, m.head_dim, m.d_state, chunk);
    round_state(values.data(), state.to, m, head, rounding_after(end));
  }
}

// Any number of tokens of every sequence.
template <typename S>
inline void scan(const Mixer& m, const ScanViews<S>& views) {
  int64_t size = m.head_dim * m.d_state, grain = m.tokens == 1 ? m.settings.heads_per_task : 1;
  parallel_tasks(m.batch * m.heads, grain, [&](int64_t begin, int64_t end) {
    std::vector<S> unwritten;  // the state of a step that leaves it as it is
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / m.heads, head = task % m.heads, slot = m.rows.write_slots[row];
      if (m.rows.lengths[row] == 0) continue;
      if (slot < 0) unwritten.resize(size);
      HeadState<S> state{
          views.ssm_state + (m.rows.read_slots[row] * m.heads + head) * size,
          slot < 0 ? unwritten.data() : views.ssm_state + (slot * m.heads + head) * size};
      HeadTokens tokens = head_tokens(m, views, row, head);
      if constexpr (IS_REDUCED<S>)
        scan_rounded(m, tokens, state, row, head);
      else
        scan_head(tokens, state, m.head_dim, m.d_state, m.settings.chunk_size);
    }
  });
}

}  // namespace granite4_neuron
