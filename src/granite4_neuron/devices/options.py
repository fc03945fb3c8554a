"""Options of several backends."""

from granite4_neuron.config.choices import DECODE_KERNELS, EXPERTS_DECODE, PREFILL_SCANS, QUANTIZATIONS
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.runtime.declaration import Option

STATE_DTYPES = ("float32", "float16", "bfloat16")

DTYPE = Option(
    "dtype",
    "dtype of weights and activations (default: that of the weights)",
    choices=DTYPES,
    is_dtype=True,
    changes_numbers=False,  # it is told with the weights
)
PREFILL_SCAN = Option(
    "prefill_scan",
    "how Mamba layers scan a prompt: linear in its length (chunked), with one decay matrix per step (quadratic), or, "
    "on Neuron devices, with an NKI kernel token by token (scan) or chunk by chunk (ssd); default: chunked, with "
    "--kernels nki ssd",
    default=PREFILL_SCANS[0],
    choices=PREFILL_SCANS,
)
DECODE_KERNEL = Option(
    "decode_kernel",
    "how Mamba layers advance by one token: in torch, or, on Neuron devices, with an NKI kernel (default: that of "
    "--kernels)",
    default=DECODE_KERNELS[0],
    choices=DECODE_KERNELS,
)
PREFILL_BUCKETS = Option(
    "prefill_buckets",
    "for --backend torch and xla: tokens of the graphs for prompts; a prompt is cut into pieces of these, of which the "
    "last is padded (default: 128 512, on a CPU or GPU also 2048, on a GPU also 8192)",
    metavar="N",
    least=1,
    is_list=True,
    changes_numbers=False,  # the places where prompts are cut are compared
)
EXPERTS = Option(
    "experts_decode",
    "how graphs compute the experts of decoded tokens: with an NKI kernel that reads each chosen expert once (kernel), "
    "with all experts for every token (all), or with weights fetched by index (gather); default: on Neuron devices "
    "gather for one or two tokens whose experts are less than all, and all for more, or kernel with the decode kernel "
    "nki; elsewhere the device's own",
    "experts_decode belongs to the backends torch and xla, which compile graphs; the backend here is {backend}.",
    choices=EXPERTS_DECODE,
)
STATE_DTYPE = Option(
    "state_dtype",
    "for --backend cpu, and torch on a CPU or GPU: dtype of SSM states; 16 bits are rounded stochastically (default: "
    "float32)",
    "SSM states in 16 bits are for the backends cpu, torch and nxdi; {backend} has them in float32.",
    choices=STATE_DTYPES,
    is_dtype=True,
    everywhere="float32",
    changes_numbers=False,  # the dtype of the state itself is compared
)
QUANTIZE = Option(
    "quantize",
    "for the cpu backend, and --backend torch on a GPU: hold the large weights in this format; lossless12, for the cpu "
    "backend only, has the numbers of bfloat16 (default: as stored)",
    "{value} weights are for the backend cpu, some for a GPU; {backend} runs the original in its dtype.",
    choices=QUANTIZATIONS,
    changes_numbers=False,  # it changes the weights
)
ARITHMETIC = (DTYPE, PREFILL_SCAN, DECODE_KERNEL)
# Of backends that compile graphs.
COMPILED = (*ARITHMETIC, EXPERTS, PREFILL_BUCKETS)
