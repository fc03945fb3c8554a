"""Speculative decoding: drafters, and the rejection sampler."""

from granite4_neuron.speculation.drafters import Drafter, DraftRequest, NgramDrafter
from granite4_neuron.speculation.metadata import SamplerOutput, SamplingMetadata, SpecDecodeMetadata
from granite4_neuron.speculation.ngram import ngram_propose
from granite4_neuron.speculation.rejection_sampler import (
    RejectionSampler,
    expand_batch_to_tokens,
    rejection_sample,
    sample_recovered_tokens,
)

__all__ = [
    "DraftRequest",
    "Drafter",
    "NgramDrafter",
    "RejectionSampler",
    "SamplerOutput",
    "SamplingMetadata",
    "SpecDecodeMetadata",
    "expand_batch_to_tokens",
    "ngram_propose",
    "rejection_sample",
    "sample_recovered_tokens",
]
