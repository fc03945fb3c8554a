"""Continuous batching: the choice of tokens for each step, and of slots in a runtime's state."""

from granite4_neuron.engine.constraint import Constraint
from granite4_neuron.engine.drafting.draft_model import DraftModel
from granite4_neuron.engine.drafting.mtp import MTPDrafter
from granite4_neuron.engine.engine import Engine
from granite4_neuron.engine.logprobs import TokenLogprob
from granite4_neuron.engine.prefix.cache import PrefixCache
from granite4_neuron.engine.prefix.folder import PrefixFolder
from granite4_neuron.engine.prefix.slot_cache import SlotPrefixCache, spare_slots
from granite4_neuron.engine.request import GenerationStats, Output, PromptReport, Request
from granite4_neuron.engine.sampling import Sampler
from granite4_neuron.engine.sampling_params import SamplingParams

__all__ = [
    "Constraint",
    "DraftModel",
    "Engine",
    "GenerationStats",
    "MTPDrafter",
    "Output",
    "PrefixCache",
    "PrefixFolder",
    "PromptReport",
    "Request",
    "Sampler",
    "SamplingParams",
    "SlotPrefixCache",
    "TokenLogprob",
    "spare_slots",
]
