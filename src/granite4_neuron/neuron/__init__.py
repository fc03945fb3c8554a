"""AWS Trainium: the port to NxD Inference, and what its graphs cost."""
