"""Tokens drafted ahead of the target model: where they come from, and which of them stand."""

from granite4_neuron.speculation.drafters import Drafter, DraftModel, DraftRequest, NgramDrafter
from granite4_neuron.speculation.metadata import SamplerOutput, SamplingMetadata, SpecDecodeMetadata
from granite4_neuron.speculation.ngram import ngram_propose
from granite4_neuron.speculation.rejection_sampler import (
    RejectionSampler,
    expand_batch_to_tokens,
    rejection_sample,
    sample_recovered_tokens,
)

__all__ = [
    "DraftModel",
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
