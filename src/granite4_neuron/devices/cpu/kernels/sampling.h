// The choice of tokens from logits, as ops/sampling.py defines it.
#pragma once

#include "common.h"

namespace granite4_neuron {

// Chooses a token for each of some rows of logits, [vocab_size] float32 each.
// reals: of each row scale (0 for the highest score), top_p, typical_p, cutoff, and the penalties frequency, presence
// and repetition. wholes: of each row seed, place, top_k, the numbers in `masks` of its mask and its allowed tokens (-1 for
// none), and the number of log-probabilities (-1 for no report).
// masks: [at least vocab_size / 8] uint8 each. tokens: [m] int64, and values: [m] float32: of each row its biases,
// penalties (with counts) and forbidden tokens; part i of row r is from offsets[3 r + i] to offsets[3 r + i + 1].
// Returns the rows' tokens, or the negative numbers that stand for none; float32 [rows, 1 + num_top] log-probabilities
// of the token and of the likeliest; int64 [rows, 1 + num_top] the token's rank, and the likeliest tokens, then -1.
std::tuple<std::vector<int64_t>, at::Tensor, at::Tensor> choose(
    at::TensorList logits, at::ArrayRef<double> reals, at::IntArrayRef wholes, at::TensorList masks,
    const at::Tensor& tokens, const at::Tensor& values, at::IntArrayRef offsets, int64_t num_top);

// The last two results of `choose` for a given token after each row of logits [rows, vocab_size].
std::tuple<at::Tensor, at::Tensor> token_logprobs(
    const at::Tensor& logits, at::IntArrayRef tokens, int64_t num_top);

}  // namespace granite4_neuron
