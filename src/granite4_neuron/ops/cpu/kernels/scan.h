// The Mamba-2 mixer's second half: the recurrence over each head's state, token by token in decode and chunk by chunk
// otherwise.
#pragma once

#include "gemm.h"
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
  float* y;          // [batch, tokens, inner]
};

// One head's part of one sequence's tokens: a row each of x, B, C and y, and a step size.
struct HeadTokens {
  int64_t length;
  MatrixView<const float> x;     // [length, head_dim]
  MatrixView<const float> B, C;  // [length, d_state]
  MatrixView<const float> dt;    // [length, 1]
  MatrixView<float> y;           // [length, head_dim]
  float A, D;

  // `count` tokens at most, from `start` on.
  HeadTokens part(int64_t start, int64_t count) const {
    return {std::min(count, length - start), x.from_row(start), B.from_row(start), C.from_row(start),
            dt.from_row(start), y.from_row(start), A, D};
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
          {views.y + first * m.inner() + head * m.head_dim, m.inner()},
          m.A[head],
          m.D[head]};
}

// A head's state before and after a call, each [head_dim, d_state]; they may be the same. `to` is null where the state
// is not to be written.
template <typename S>
struct HeadState {
  const S* from;
  S* to;
};

template <typename S>
inline HeadState<S> head_state(const Mixer& m, const ScanViews<S>& views, int64_t row, int64_t head) {
  int64_t size = m.head_dim * m.d_state;
  int64_t slot = m.rows.write_slots[row];
  return {views.ssm_state + (m.rows.read_slots[row] * m.heads + head) * size,
          slot < 0 ? nullptr : views.ssm_state + (slot * m.heads + head) * size};
}

// How a state's values are stored in S: rounded, or as they are.
template <typename S>
struct StateStores : StateRounding {
  using StateRounding::StateRounding;
};

template <>
struct StateStores<float> {
  StateStores(const Rounding&, int64_t, int64_t, int64_t) {}
  void start_rows(int64_t, int64_t) {}
  void store_one(float* to, int64_t, int64_t, float value) {
    *to = value;
  }
  void store(float* to, int64_t, int64_t, Vec first, Vec second) {
    store_pair(to, first, second);
  }
};

// `update_state` for rows p to p + ROWS - 1 of the state.
template <int ROWS, typename S>
inline void update_rows(
    const HeadTokens& token, HeadState<S> state, int64_t p, int64_t d_state, float decay, StateStores<S>& stores) {
  const float *x = token.x.data + p, *B = token.B.data, *C = token.C.data;
  const S* old = state.from + p * d_state;
  S* now = state.to + p * d_state;
  float dt_x[ROWS], rest[ROWS] = {};
  Vec totals[ROWS], add[ROWS], keep(decay);
  int64_t shared = p % SHARED_ROWS;
  for (int r = 0; r < ROWS; r++) {
    dt_x[r] = *token.dt.data * x[r];
    add[r] = Vec(dt_x[r]);
    totals[r] = Vec(0.0f);
  }
  int64_t n = 0;
  for (; n + PAIR <= d_state; n += PAIR) {
    Vec first_B = Vec::loadu(B + n), second_B = Vec::loadu(B + n + LANES);
    Vec first_C = Vec::loadu(C + n), second_C = Vec::loadu(C + n + LANES);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      auto [first, second] = load_pair(old + r * d_state + n);
      first = at::vec::fmadd(keep, first, add[r] * first_B);
      second = at::vec::fmadd(keep, second, add[r] * second_B);
      stores.store(now + r * d_state + n, shared + r, n, first, second);
      totals[r] = at::vec::fmadd(second, second_C, at::vec::fmadd(first, first_C, totals[r]));
    }
  }
  for (; n < d_state; n++) {
    for (int r = 0; r < ROWS; r++) {
      float value = std::fma(decay, static_cast<float>(old[r * d_state + n]), dt_x[r] * B[n]);
      stores.store_one(now + r * d_state + n, shared + r, n, value);
      rest[r] = std::fma(value, C[n], rest[r]);
    }
  }
  for (int r = 0; r < ROWS; r++) token.y.data[p + r] = sum(totals[r]) + rest[r] + token.D * x[r];
}

// state <- exp(dt A) state + dt x (outer) B for one head and its first token; y = state . C + D x.
//
// stores: of the head's sequence at this token.
template <typename S>
inline void update_state(
    const HeadTokens& token, HeadState<S> state, const Mixer& m, int64_t head, StateStores<S> stores) {
  float decay = std::exp(*token.dt.data * token.A);
  auto update = [&]<int ROWS>(int64_t p) {
    stores.start_rows(head, p);
    update_rows<ROWS>(token, state, p, m.d_state, decay, stores);
  };
  int64_t p = 0;
  // Rows that share random numbers go together. In float32 none do, and memory is faster in one stream than in several.
  if constexpr (IS_REDUCED<S>)
    for (; p + SHARED_ROWS <= m.head_dim; p += SHARED_ROWS) update.template operator()<SHARED_ROWS>(p);
  for (; p < m.head_dim; p++) update.template operator()<1>(p);
}

// One token of every sequence.
template <typename S>
inline void decode(const Mixer& m, const ScanViews<S>& views) {
  parallel_tasks(m.batch * m.heads, m.settings.heads_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / m.heads, head = task % m.heads;
      if (m.rows.lengths[row] == 0) continue;
      StateStores<S> stores(m.settings.rounding, m.rows.starts[row], m.head_dim, m.d_state);
      update_state(head_tokens(m, views, row, head), head_state(m, views, row, head), m, head, stores);
    }
  });
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// scores[i, j] = C_i . B_j for the tokens of one chunk and group; [CHUNK, CHUNK], what lies above the diagonal is junk.
template <int64_t CHUNK>
inline void chunk_scores(const HeadTokens& tokens, int64_t d_state, float* scores, std::vector<float>& scratch) {
  scratch.resize(d_state * CHUNK);
  for (int64_t j = 0; j < CHUNK; j++)
    for (int64_t n = 0; n < d_state; n++) scratch[n * CHUNK + j] = j < tokens.length ? tokens.B.row(j)[n] : 0.0f;
  MatrixView<const float> B_transposed{scratch.data(), CHUNK};
  for (int64_t i = 0; i < tokens.length; i += GEMM_ROWS) {
    int64_t rows = std::min(GEMM_ROWS, tokens.length - i);
    int64_t columns = std::min(CHUNK, round_up(i + rows, LANES));
    gemm({rows, columns, d_state}, tokens.C.from_row(i), B_transposed, {scores + i * CHUNK, CHUNK}, false);
  }
}

// One head of one sequence, chunk by chunk: Dao and Gu 2024, section 6; the equations are those of ops.ssd_quadratic.
//
// CHUNK: tokens that are scanned at once, a multiple of LANES. Their decay matrix and the state should stay in the
// nearest caches.
template <int64_t CHUNK>
struct HeadScan {
  int64_t head_dim, d_state, columns;
  // The state as [d_state, head_dim]: all products have the channels of the head in vectors. Columns are padded.
  std::vector<float> state, dt_x, out, decayed, log_decay, segment, chunk_end_x;

  HeadScan(int64_t head_dim, int64_t d_state)
      : head_dim(head_dim), d_state(d_state), columns(round_up(head_dim, LANES)), state(d_state * columns),
        dt_x(CHUNK * columns), out(CHUNK * columns), decayed(CHUNK * CHUNK), log_decay(CHUNK), segment(CHUNK),
        chunk_end_x(CHUNK * columns) {}

  // scores: of `chunk_scores`, chunk by chunk. round: what becomes of the state after so many tokens.
  template <typename S, typename Round>
  void run(const HeadTokens& tokens, const float* scores, HeadState<S> of_head, const Round& round) {
    for (int64_t p = 0; p < head_dim; p++)
      for (int64_t n = 0; n < d_state; n++)
        state[n * columns + p] = static_cast<float>(of_head.from[p * d_state + n]);
    for (int64_t start = 0; start < tokens.length; start += CHUNK, scores += CHUNK * CHUNK) {
      HeadTokens of_chunk = tokens.part(start, CHUNK);
      chunk(of_chunk, scores);
      round(*this, start + of_chunk.length);
    }
    if (of_head.to == nullptr) return;
    for (int64_t p = 0; p < head_dim; p++)
      for (int64_t n = 0; n < d_state; n++) of_head.to[p * d_state + n] = static_cast<S>(state[n * columns + p]);
  }

  // The state as if it had been stored in S.
  template <typename S>
  void round_state(int64_t head, StateStores<S> stores) {
    std::vector<float> row(round_up(d_state, PAIR));
    std::vector<S> rounded(row.size());
    for (int64_t p = 0; p < head_dim; p++) {
      for (int64_t n = 0; n < d_state; n++) row[n] = state[n * columns + p];
      int64_t shared = p % SHARED_ROWS;
      if (shared == 0) stores.start_rows(head, p);
      for (int64_t n = 0; n < d_state; n += PAIR)
        stores.store(&rounded[n], shared, n, Vec::loadu(&row[n]), Vec::loadu(&row[n + LANES]));
      for (int64_t n = 0; n < d_state; n++) state[n * columns + p] = static_cast<float>(rounded[n]);
    }
  }

 private:
  void chunk(const HeadTokens& tokens, const float* scores) {
    int64_t length = tokens.length;
    for (int64_t i = 0; i < length; i++) {
      float step = *tokens.dt.row(i);
      log_decay[i] = step * tokens.A;
      for (int64_t p = 0; p < head_dim; p++) dt_x[i * columns + p] = step * tokens.x.row(i)[p];
    }
    decay_scores(scores, length);

    // What the state gives: out_i = exp(a_1 + ... + a_i) C_i . S.
    gemm({length, columns, d_state}, tokens.C, view(state), view(out), false);
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
      gemm({rows, columns, i + rows}, {&decayed[i * CHUNK], CHUNK}, view(dt_x), view(out).from_row(i), true);
    }
    for (int64_t i = 0; i < length; i++)
      for (int64_t p = 0; p < head_dim; p++) tokens.y.row(i)[p] = out[i * columns + p] + tokens.D * tokens.x.row(i)[p];

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
    gemm({d_state, columns, length}, tokens.B.transposed(), view(chunk_end_x), view(state), true);
  }

  MatrixView<float> view(std::vector<float>& matrix) const {
    return {matrix.data(), columns};
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

// Any number of tokens of every sequence.
//
// A state in a reduced dtype is rounded after each chunk, as it is between two steps: so it does not matter at which
// ends of chunks a prompt is cut into steps.
template <int64_t CHUNK, typename S>
inline void scan(const Mixer& m, const ScanViews<S>& views) {
  int64_t groups = m.settings.groups, heads_per_group = m.heads / groups;
  int64_t chunks = (m.tokens + CHUNK - 1) / CHUNK, block = CHUNK * CHUNK;
  std::vector<float> scores(m.batch * groups * chunks * block);
  parallel_tasks(m.batch * groups * chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / (groups * chunks), group = task / chunks % groups, start = task % chunks * CHUNK;
      if (start >= m.rows.lengths[row]) continue;
      HeadTokens of_group = head_tokens(m, views, row, group * heads_per_group);
      chunk_scores<CHUNK>(of_group.part(start, CHUNK), m.d_state, &scores[task * block], scratch);
    }
  });
  parallel_tasks(m.batch * m.heads, 1, [&](int64_t begin, int64_t end) {
    HeadScan<CHUNK> head_scan(m.head_dim, m.d_state);
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / m.heads, head = task % m.heads;
      if (m.rows.lengths[row] == 0) continue;
      const float* of_group = &scores[(row * groups + m.group_of(head)) * chunks * block];
      auto round = [&](HeadScan<CHUNK>& of_head, int64_t tokens) {
        if constexpr (IS_REDUCED<S>) {
          int64_t position = m.rows.starts[row] + tokens - 1;
          of_head.template round_state<S>(head, {m.settings.rounding, position, m.head_dim, m.d_state});
        }
      };
      head_scan.run(head_tokens(m, views, row, head), of_group, head_state(m, views, row, head), round);
    }
  });
}

inline void check_chunk_size(int64_t chunk_size) {
  TORCH_CHECK(
      chunk_size == 32 || chunk_size == 64 || chunk_size == 128, "chunk_size is ", chunk_size,
      "; it must be 32, 64 or 128");
}

template <typename S>
inline void recur(const Mixer& m, const ScanViews<S>& views) {
  if (m.tokens == 1) return decode(m, views);
  if (m.settings.chunk_size == 32) return scan<32>(m, views);
  if (m.settings.chunk_size == 64) return scan<64>(m, views);
  return scan<128>(m, views);
}

}  // namespace granite4_neuron
