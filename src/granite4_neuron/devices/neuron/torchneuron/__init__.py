"""PyTorch's device neuron, of Neuron SDK 2.33 and later, as the backend torch uses it (`devices.torch`)."""
