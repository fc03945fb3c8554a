"""NxD Inference's attention with Granite's scale, and without repeated keys and values for grouped heads."""

from __future__ import annotations

import torch
from neuronx_distributed_inference.modules.attention.attention_base import FlashAttentionStrategy, NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding

from granite4_neuron.devices.neuron.nxdi.config import GraniteMoeHybridInferenceConfig

# Keys that a step of several tokens visits at a time, to limit its scores [heads, tokens, keys], its largest tensor.
_KEYS_PER_BLOCK = 2048


class NeuronAttention(NeuronAttentionBase):
    """Projections, rotary positions, cache and context encoding kernel are NxD Inference's.

    The kernel `attention_cte` takes steps of a multiple of 256 tokens, of 512 from 1,024 on. In the tests' NumPy
    emulator AWS's public source of it agrees with plain attention, also after a cached prefix.

    The attention in torch is here: the query heads that share a key head are rows of one product, so no key and no
    value is repeated. The scores are multiplied by the config's attention_multiplier.
    """

    def __init__(self, config: GraniteMoeHybridInferenceConfig):
        granite = config.granite
        rotary = RotaryEmbedding(granite.head_dim, granite.max_position_embeddings, granite.rope_theta)
        super().__init__(
            config,
            hidden_size=granite.hidden_size,
            num_attention_heads=granite.num_attention_heads,
            num_key_value_heads=granite.num_key_value_heads,
            head_dim=granite.head_dim,
            rotary_emb=rotary if granite.uses_rope else None,
            rms_norm_eps=granite.rms_norm_eps,
            qkv_bias=granite.attention_bias,
            o_bias=granite.attention_bias,
            softmax_scale=1.0 / granite.attention_multiplier,  # NxD Inference divides the scores by it
        )

    def perform_prefill(
        self,
        Q: torch.Tensor,
        K: torch.Tensor,
        V: torch.Tensor,
        q_len: int,
        bsz: int,
        attention_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, FlashAttentionStrategy]:
        """Compute context encoding, with NxD Inference's kernel if it supports the number of tokens."""
        strategy = self.get_flash_attention_strategy(q_len, has_attention_mask=True)
        if strategy != FlashAttentionStrategy.NONE:
            return super().perform_prefill(Q, K, V, q_len, bsz, attention_mask)
        query = self._grouped(Q)
        mask = attention_mask.repeat(1, 1, query.shape[2] // q_len, 1)
        return _Softmax(query).add(K, V, mask).result().view(Q.shape), strategy

    def compute_for_token_gen(
        self,
        Q: torch.Tensor,
        K: torch.Tensor,
        V: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        active_mask: torch.Tensor | None,
        is_prefix_caching: bool = False,
    ) -> torch.Tensor:
        """Compute one or more tokens after those in the cache; several with NxD Inference's kernel if it supports them.

        Args:
            Q: [batch, heads, tokens, head_dim].
            K, V: of the tokens themselves, [batch, kv_heads, tokens, head_dim].
            past_key_value: keys and values, [batch, kv_heads, n, head_dim].
            attention_mask: [batch, 1, tokens, n], which cache entries are before the tokens; the same for all tokens.
            active_mask: [1, 1, tokens, tokens], which tokens see which; None for one token.
        """
        batch, _, tokens, _ = Q.shape
        strategy = self.get_flash_attention_strategy(tokens, has_attention_mask=True)
        if tokens > 1 and batch == 1 and strategy != FlashAttentionStrategy.NONE:
            prior_mask = attention_mask[:, 0, 0]
            output, _ = self.perform_prefix_prefill(Q, K, V, tokens, batch, prior_mask, past_key_value, active_mask)
            return output.transpose(2, 3)
        query = self._grouped(Q)
        softmax = _Softmax(query)
        if tokens == 1 or active_mask is None:
            return softmax.add(*past_key_value, attention_mask).add(K, V).result().view(Q.shape)
        if query.shape[2] <= query.shape[3]:  # there are fewer scores than entries of keys to mask
            softmax.add(*past_key_value, attention_mask[:, :, :1])
        else:
            keys, values = past_key_value
            is_before = attention_mask[:, :, 0, :, None]
            for start in range(0, is_before.shape[2], _KEYS_PER_BLOCK):
                block = slice(start, start + _KEYS_PER_BLOCK)
                softmax.add_where(keys[:, :, block], values[:, :, block], is_before[:, :, block])
        mask = active_mask.repeat(1, 1, query.shape[2] // tokens, 1)
        return softmax.add(K, V, mask).result().view(Q.shape)

    def _grouped(self, query: torch.Tensor) -> torch.Tensor:
        """Map [batch, heads, tokens, head_dim] to [batch, kv_heads, heads per kv head * tokens, head_dim], scaled."""
        batch, _, _, head_dim = query.shape
        scaled = query.float() / self.softmax_scale
        return scaled.to(query.dtype).reshape(batch, self.num_key_value_heads, -1, head_dim)


class _Softmax:
    """Attention of some queries over keys in several pieces; the running sums are in float32.

    Source: the online softmax of Milakov and Gimelshein 2018, as in FlashAttention (Dao et al. 2022, algorithm 1).

    Args:
        query: [batch, kv_heads, rows, head_dim], scaled.
    """

    _sums: torch.Tensor
    _total: torch.Tensor

    def __init__(self, query: torch.Tensor):
        self._query = query
        self._top: torch.Tensor | None = None

    def add(self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None) -> _Softmax:
        """Add keys and values [batch, kv_heads, keys, head_dim] for which a mask [.., rows or 1, keys] is true."""
        scores = _multiply(self._query, key.transpose(2, 3)).float()
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        top, rescale = self._new_top(scores)
        weights = torch.exp(scores - top)
        sums = _multiply(weights.to(value.dtype), value).float()
        self._accumulate(sums, weights.sum(-1, keepdim=True), top, rescale)
        return self

    def add_where(self, key: torch.Tensor, value: torch.Tensor, is_there: torch.Tensor) -> _Softmax:
        """Like `add`, for a mask [batch, 1, keys, 1] that is the same for all rows.

        It masks keys and values instead of the scores, of which there are more with many rows. A masked key is replaced
        by the first key, so that the largest score is right if any key is there. Masked values, and their parts of the
        sum, are zeros.
        """
        first = key[:, :, :1]
        scores = _multiply(self._query, key.where(is_there, first).transpose(2, 3)).float()
        top, rescale = self._new_top(scores)
        weights = torch.exp(scores - top).to(value.dtype)
        sums = _multiply(weights, value.masked_fill(~is_there, 0.0)).float()
        total = torch.bmm(weights.flatten(1, 2), is_there[:, 0].to(value.dtype)).view(top.shape)
        self._accumulate(sums, total.float(), top, rescale)
        return self

    def result(self) -> torch.Tensor:
        """Return [batch, kv_heads, rows, head_dim]."""
        return (self._sums / self._total).to(self._query.dtype)

    def _new_top(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        top = scores.amax(-1, keepdim=True)
        if self._top is None:
            return top, None
        top = torch.maximum(top, self._top)
        return top, torch.exp(self._top - top)

    def _accumulate(
        self, sums: torch.Tensor, total: torch.Tensor, top: torch.Tensor, rescale: torch.Tensor | None
    ) -> None:
        self._sums = sums if rescale is None else self._sums * rescale + sums
        self._total = total if rescale is None else self._total * rescale + total
        self._top = top


def _multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply matrices [batch, kv_heads, ...] as products of rank 3, because the compiler has refused others."""
    return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2])
