"""Show that KVQuantMode.CUSTOM is another name of KVQuantMode.OCTAVE_K3V4.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 where vLLM has no such members (0.32.0 and before).
"""

import sys

from vllm.v1.kv_cache_interface import KVQuantMode


def main() -> int:
    """Compare the two members, and read what each is taken for."""
    if not {"CUSTOM", "OCTAVE_K3V4"} <= KVQuantMode.__members__.keys():
        print("this version of vLLM has no KVQuantMode.CUSTOM beside OCTAVE_K3V4")
        return 77
    custom, octave = KVQuantMode["CUSTOM"], KVQuantMode["OCTAVE_K3V4"]
    print(f"KVQuantMode.CUSTOM is {custom!r}, and KVQuantMode.OCTAVE_K3V4 is {octave!r}")
    print(f"CUSTOM.is_octave: {custom.is_octave}; OCTAVE_K3V4.is_custom_mode: {octave.is_custom_mode}")
    return 0 if custom is octave else 1


if __name__ == "__main__":
    sys.exit(main())
