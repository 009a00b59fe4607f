"""Whether attention may live inside a captured CUDA graph: recorders, the probes, and what they measured."""
