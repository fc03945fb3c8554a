"""Values of options: names that the command line offers and other modules check.

This module imports nothing else from the package, so that the command line knows them without importing torch.
"""

from pathlib import Path

CPU_KERNELS = ("fused", "torch")
# Each has a module in ops/formats.
QUANTIZATIONS = tuple(sorted(file.stem for file in (Path(__file__).parents[1] / "ops" / "formats").glob("[a-z]*.py")))
INT4_GROUP = 32  # columns of a row that share a scale
FP8_GROUP = 128  # the same of weights that stay in FP8

# How keys and values are written to their cache, see `devices.graphs.operators.write_cache_as`.
KV_WRITES = ("index", "rows", "select")

NKI_PREFILL_SCANS = ("scan", "ssd")
PREFILL_SCANS = ("chunked", "quadratic", *NKI_PREFILL_SCANS)
DECODE_KERNELS = ("torch", "nki")
# How compiled graphs compute the experts of decoded tokens, see `devices.selection`.
EXPERTS_DECODE = ("kernel", "all", "gather")
# The environment variable that names a folder of tuned launch parameters.
FOLDER_VARIABLE = "GRANITE4_TUNED_CONFIG_FOLDER"

# Advice for backends that do not run adapters beside the weights.
MERGE_INSTEAD = "convert --adapter FOLDER merges one into the weights for any backend"
NO_ADAPTERS = f"adapters run on the backend cpu only, with its fused kernels and their chunked scan; {MERGE_INSTEAD}."

NO_CHOICES = "only a single GPU chooses tokens by all options; elsewhere the host does, from whole logits."

NO_HIDDEN_STATES = "only the backend cpu gives a model's hidden states to a drafter."

# The largest difference of a float32 logit from transformers'.
FLOAT32_TOLERANCE = 1e-4
