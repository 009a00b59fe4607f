"""Show that vLLM's infer_global_hyperparameters writes into its argument.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone.
"""

import sys

from vllm.v1.attention.backends.utils import PerLayerParameters, infer_global_hyperparameters


def main() -> int:
    """Infer from two different layers, then from the first of them alone, and look at the first answer again."""
    layers = {"layer.0": PerLayerParameters(-1, None, 1.0), "layer.1": PerLayerParameters(127, None, 1.0)}
    both = infer_global_hyperparameters(layers)
    before = both.has_same_all_params
    infer_global_hyperparameters({"layer.0": layers["layer.0"]})
    print(f"the answer is the caller's first entry: {both is layers['layer.0']}")
    print(f"has_same_all_params of the first answer: {before}, and {both.has_same_all_params} after a second call")
    return 0 if both.has_same_all_params != before else 1


if __name__ == "__main__":
    sys.exit(main())
