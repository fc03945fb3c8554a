// Attention over a cache that is kept per slot, writing to that cache, and attention over keys and values in pages.
#pragma once

#include <ATen/core/Tensor.h>

#include "packed.h"

namespace granite4_neuron {

// As ops.write_cache, for one cache. cache: [slots, kv_heads, max_length, head_dim]; values: [batch, tokens, kv_heads,
// head_dim]; positions: [batch, tokens or 1], the first token's. Padded tokens are written nowhere.
void write_cache(
    at::Tensor cache, const at::Tensor& values, const at::Tensor& positions, const at::Tensor& lengths,
    const at::Tensor& slots);

// As ops.cached_attention. query: [batch, tokens, num_heads, head_dim]; key_cache, value_cache: [slots, kv_heads,
// max_length, head_dim]; positions: [batch, tokens or 1], the first token's. Only entries that a row has written are
// read; padding gives 0.
at::Tensor cached_attention(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& positions,
    const at::Tensor& lengths, const at::Tensor& slots, double scale);

// The rows of a step over a cache: their tokens, and each row's slot and its first token's position, [rows], int64.
struct CacheRows {
  PackedRows tokens;
  at::Tensor slots, starts;
};

// `write_cache` for rows of different lengths. values: [tokens, kv_heads, head_dim].
void write_rows(at::Tensor cache, const at::Tensor& values, const CacheRows& rows);

// `cached_attention` for rows of different lengths. query: [tokens, num_heads, head_dim].
at::Tensor attend_rows(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache, const CacheRows& rows,
    double scale);

// The rows of a step, as `PagedSequences` has them; int32.
struct SequenceRows {
  at::Tensor starts, lengths, pages;
};

// As devices.cpu.operators.paged_attention, which is the Python side, for all tokens of a step.
at::Tensor paged_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor key_pages,
    at::Tensor value_pages, const SequenceRows& rows, double scale);

}  // namespace granite4_neuron
