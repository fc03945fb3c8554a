"""PyTorch's device cpu, for the backend torch."""

from granite4_neuron.devices.torch_device import TorchDevice

# Without an SBUF to fit into, a long prompt takes fewer pieces.
CPU = TorchDevice("cpu", long_prompts=(2048,), keeps_snapshots=True)
