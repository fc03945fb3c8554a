"""AWS Trainium: the port to NxD Inference, and the costs of its graphs."""
