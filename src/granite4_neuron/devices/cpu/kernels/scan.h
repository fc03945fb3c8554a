// The Mamba-2 mixer's second half: the recurrence over each head's state, token by token.
//
// One token after another is as fast as chunks of matrix products (Dao and Gu 2024, section 6) if a part of the state
// stays in registers for many tokens. And the arithmetic and its order are the same however a sequence is cut into
// steps: prompts, verified tokens and single tokens give the same results bit by bit.
#pragma once

#include "buffers.h"
#include "mixer.h"
#include "parallel.h"
#include "views.h"

namespace granite4_neuron {

// The inputs and outputs of the second half: inputs after their activation, step sizes, states and results.
//
// S is the dtype of states, which are computed in float32 and rounded where they are stored.
template <typename S>
struct ScanViews {
  const float* xBC;  // [tokens, channels], with channels = inner + 2 * groups * d_state
  const float* dt;   // [tokens, heads]
  S* ssm_state;      // [slots, heads, head_dim, d_state]
  float* y;          // [tokens, inner]; null if it is not wanted
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
  int64_t first = m.rows.offsets[row], groups_width = m.settings.groups * m.d_state;
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

// Some tokens of one head, for channels `p` to p + CHANNELS and a d_state of VECTORS vectors; their state is kept in
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
    Vec decay(decays[t]), acc[CHANNELS];
#pragma GCC unroll 2
    for (int c = 0; c < CHANNELS; c++) {
      acc[c] = Vec(0.0f);
      Vec dt_x(dt * x[c]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++)
        now[c][v] = advance(now[c][v], decay, dt_x, Vec::loadu(B + v * LANES), Vec::loadu(C + v * LANES), acc[c]);
    }
    if (tokens.y.data == nullptr) continue;
#pragma GCC unroll 2
    for (int c = 0; c < CHANNELS; c++) tokens.y.row(t)[p + c] = output(acc[c], tokens.D, x[c]);
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
// block: tokens applied to a part of the state at a time; their B and C should stay in the nearest cache.
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

// Scans of states in float32.
class PlainScan {
 public:
  explicit PlainScan(const Mixer& m) : m_(m) {}

  // All tokens of one head of one sequence.
  void run(const HeadTokens& tokens, HeadState<float> state, int64_t, int64_t) {
    scan_head(tokens, state, m_.head_dim, m_.d_state, m_.settings.chunk_size);
  }

 private:
  const Mixer& m_;
};

// `count` values of a 16-bit dtype, LANES at most, followed by zeros.
template <typename S>
inline Vec load_some(const S* from, int64_t count) {
  float values[LANES] = {};
  to_float(from, values, count);
  return Vec::loadu(values);
}

template <typename S>
inline void store_some(Vec from, S* to, int64_t count) {
  float values[LANES];
  from.store(values);
  from_float(values, to, count);
}

// Scans of states in a 16-bit dtype S. Such a state is rounded after every token, wherever a step ends; y is computed
// before the rounding. The rest is the arithmetic of `scan_head`, in the same order.
template <typename S>
class RoundedScan {
 public:
  explicit RoundedScan(const Mixer& m)
      : m_(m), rounding_(m.settings.rounding, m.head_dim, m.d_state),
        block_(std::min(m.longest, m.settings.chunk_size)), words_(block_ * rounding_.num_words()),
        totals_(block_ * SHARED_ROWS * LANES) {}

  // All tokens of one head of one sequence; `position` is the first token's.
  void run(const HeadTokens& tokens, HeadState<S> state, int64_t head, int64_t position) {
    for (int64_t start = 0; start < tokens.length; start += block_, state.from = state.to) {
      HeadTokens some = tokens.part(start, block_);
      for (int64_t t = 0; t < some.length; t++) decays_[t] = std::exp(*some.dt.row(t) * some.A);
      for (int64_t p = 0; p < m_.head_dim; p += SHARED_ROWS) {
        for (int64_t t = 0; t < some.length; t++) rounding_.fill(position + start + t, head, p, words_of(t));
        if (p + SHARED_ROWS <= m_.head_dim) {
          scan_rows<SHARED_ROWS>(some, state, p);
        } else {
          for (int64_t row = p; row < m_.head_dim; row++) scan_rows<1>(some, state, row);
        }
      }
    }
  }

 private:
  const Mixer& m_;
  StateRounding rounding_;
  int64_t block_;  // tokens applied to a part of the state at a time
  // Buffers for a block's tokens; the last three are for some rows of the state.
  std::array<float, MAX_SCAN_BLOCK> decays_;
  std::array<std::array<float, SHARED_ROWS>, MAX_SCAN_BLOCK> dt_x_;
  Scratch<uint32_t> words_;
  Scratch<float> totals_;

  uint32_t* words_of(int64_t t) {
    return words_.data() + t * rounding_.num_words();
  }
  float* total_of(int64_t t, int64_t row) {
    return totals_.data() + (t * SHARED_ROWS + row) * LANES;
  }

  // A block's tokens, for rows p to p + ROWS - 1.
  template <int ROWS>
  void scan_rows(const HeadTokens& tokens, HeadState<S> state, int64_t p) {
    for (int64_t t = 0; t < tokens.length; t++)
      for (int r = 0; r < ROWS; r++) {
        dt_x_[t][r] = *tokens.dt.row(t) * tokens.x.row(t)[p + r];
        Vec(0.0f).store(total_of(t, r));
      }
    int64_t pairs = m_.d_state / PAIR, rest = m_.d_state - pairs * PAIR;
    for (int64_t pair = 0; pair < pairs; pair++) scan_columns<ROWS, 2>(tokens, state, p, pair * PAIR, LANES);
    for (; rest > 0; rest -= LANES)
      scan_columns<ROWS, 1>(tokens, state, p, m_.d_state - rest, std::min(LANES, rest));
    if (tokens.y.data == nullptr) return;
    for (int64_t t = 0; t < tokens.length; t++)
      for (int r = 0; r < ROWS; r++)
        tokens.y.row(t)[p + r] = output(Vec::loadu(total_of(t, r)), tokens.D, tokens.x.row(t)[p + r]);
  }

  // The same for columns n and following: VECTORS vectors of `count` columns each, which stay in registers.
  template <int ROWS, int VECTORS>
  [[gnu::always_inline]] void scan_columns(
      const HeadTokens& tokens, HeadState<S> state, int64_t p, int64_t n, int64_t count) {
    int64_t d_state = m_.d_state, at = p * d_state + n, first_row = p % SHARED_ROWS, column = n % WORD_COLUMNS;
    Vec now[ROWS][VECTORS];
    for_each<ROWS>([&](auto r) {
      const S* from = state.from + at + r * d_state;
      if constexpr (VECTORS == 2) std::tie(now[r][0], now[r][1]) = load_pair(from);
      else now[r][0] = load_some(from, count);
    });
    for (int64_t t = 0; t < tokens.length; t++) {
      const float *B = tokens.B.row(t) + n, *C = tokens.C.row(t) + n;
      const uint32_t* words = words_of(t) + n / WORD_COLUMNS * WORDS;
      Vec decay(decays_[t]), acc[ROWS];
      for_each<ROWS>([&](auto r) { acc[r] = Vec::loadu(total_of(t, r)); });
      for_each<VECTORS>([&](auto v) {
        Vec of_B = Vec::loadu(B + v * LANES, count), of_C = Vec::loadu(C + v * LANES, count);
        for_each<ROWS>([&](auto r) {
          Vec exact = advance(now[r][v], decay, Vec(dt_x_[t][r]), of_B, of_C, acc[r]);
          now[r][v] = round_to<S>(exact, random_bits(words, first_row + r, column + v * LANES));
        });
      });
      for_each<ROWS>([&](auto r) { acc[r].store(total_of(t, r)); });
    }
    for_each<ROWS>([&](auto r) {
      S* to = state.to + at + r * d_state;
      if constexpr (VECTORS == 2) store_pair(to, now[r][0], now[r][1]);
      else store_some(now[r][0], to, count);
    });
  }
};

// All tokens of some rows, `grain` heads at a time.
template <typename S>
inline void scan_rows(const Mixer& m, const ScanViews<S>& views, const std::vector<int64_t>& rows, int64_t grain) {
  int64_t size = m.head_dim * m.d_state;
  parallel_tasks(rows.size() * m.heads, grain, [&](int64_t begin, int64_t end) {
    std::conditional_t<IS_REDUCED<S>, RoundedScan<S>, PlainScan> head_scan(m);
    std::vector<S> unwritten;  // scratch state for a step that writes none
    for (int64_t task = begin; task < end; task++) {
      int64_t row = rows[task / m.heads], head = task % m.heads, slot = m.rows.write_slots[row];
      if (slot < 0) unwritten.resize(size);
      HeadState<S> state{
          views.ssm_state + (m.rows.read_slots[row] * m.heads + head) * size,
          slot < 0 ? unwritten.data() : views.ssm_state + (slot * m.heads + head) * size};
      head_scan.run(head_tokens(m, views, row, head), state, head, m.rows.starts[row]);
    }
  });
}

// Any number of tokens of every row.
template <typename S>
inline void scan(const Mixer& m, const ScanViews<S>& views) {
  std::vector<int64_t> tokens, others;  // rows of one token, which are short tasks, and longer rows
  for (int64_t row = 0; row < m.num_rows; row++)
    if (m.rows.lengths[row] > 0) (m.rows.lengths[row] == 1 ? tokens : others).push_back(row);
  if (!others.empty()) scan_rows(m, views, others, 1);
  if (!tokens.empty()) scan_rows(m, views, tokens, m.settings.heads_per_task);
}

}  // namespace granite4_neuron
