"""vLLM's objects translated, on a stand-in that has newer forms: other fields, a pair, a device, another base class.

What it answers is the reference's own, so that nothing but the translation is judged. The real vLLM is examined in
tests/vllm.
"""

import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from types import ModuleType

import pytest
import torch

from attncheck import reference
from attncheck.errors import ProviderLoadError
from attncheck.harness.providers import vllm
from attncheck.harness.providers.batches import ALWAYS
from attncheck.harness.providers.examine import SUBJECTS, examine_subject
from attncheck.harness.providers.provider import Departures, SubjectSetting, load_provider
from attncheck.harness.providers.vllm_departures import DEPARTURES

SETTING = SubjectSetting(ALWAYS[1:9], torch.device("cpu"))
BY_KEY = {subject.key: subject for subject in SUBJECTS}
GONE = {"seq_lens_cpu", "num_computed_tokens_cpu"}


@dataclass
class Metadata:
    """The newer common metadata: an upper bound on the host, computed tokens by a method."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    logits_indices_padded: torch.Tensor | None = None
    num_logits_indices: int | None = None
    max_logits_per_req: int | None = None
    encoder_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: torch.Tensor | None = None

    def compute_num_computed_tokens(self):
        return self.seq_lens - self.query_start_loc.diff()

    def ours(self):
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name in OURS}
        lens = self.seq_lens_cpu_upper_bound
        computed = lens - self.query_start_loc_cpu.diff()
        return reference.CommonAttentionMetadata(**given, seq_lens_cpu=lens, num_computed_tokens_cpu=computed)


OURS = {field.name for field in fields(reference.CommonAttentionMetadata)} - GONE


def theirs(ours):
    shared = {name: getattr(ours, name) for name in OURS}
    return Metadata(**shared, seq_lens_cpu_upper_bound=ours.seq_lens_cpu)


@dataclass
class UBatchSlice:
    request_slice: slice
    token_slice: slice


class AttentionLayerBase:
    __abstractmethods__ = frozenset({"get_attn_backend"})


def split_attn_metadata(ubatch_slices, common_attn_metadata):
    assert all(type(piece) is UBatchSlice for piece in ubatch_slices)
    pieces = [reference.UBatchSlice(piece.request_slice, piece.token_slice) for piece in ubatch_slices]
    return [theirs(made) for made in reference.split_attn_metadata(pieces, common_attn_metadata.ours())]


def make_local_attention_virtual_batches(attn_chunk_size, common_attn_metadata, block_size=0):
    made = partial(reference.make_local_attention_virtual_batches, attn_chunk_size, block_size=block_size)
    ours = common_attn_metadata.ours()
    return theirs(made(ours)), lambda table: made(replace(ours, block_table_tensor=table)).block_table_tensor


def make_kv_sharing_fast_prefill_common_attn_metadata(common_attn_metadata):
    ours = common_attn_metadata.ours()
    made = reference.make_kv_sharing_fast_prefill_common_attn_metadata(ours)
    if made is ours:
        return common_attn_metadata
    assert made.max_query_len == common_attn_metadata.max_logits_per_req
    return theirs(made)


def create_fast_prefill_custom_backend(prefix, underlying_attn_backend):
    made = reference.create_fast_prefill_custom_backend(prefix, underlying_attn_backend)

    class Builder(made.get_builder_cls()):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return super().build(common_prefix_len, common_attn_metadata.ours(), fast_build)

    return type(made.__name__, (made,), {"get_builder_cls": staticmethod(lambda: Builder)})


def compute_causal_conv1d_metadata(query_start_loc_p_cpu, *, device):
    assert device == torch.device("cpu")
    return reference.compute_causal_conv1d_metadata(query_start_loc_p_cpu)


def get_per_layer_parameters(vllm_config, layer_names, cls_):
    layers = vllm_config.compilation_config.static_forward_context
    assert all(isinstance(layer, AttentionLayerBase) == hasattr(layer, "impl") for layer in layers.values())
    return reference.get_per_layer_parameters(vllm_config, layer_names, cls_)


FUNCTIONS = {
    function.__name__: function
    for function in (
        split_attn_metadata,
        make_local_attention_virtual_batches,
        make_kv_sharing_fast_prefill_common_attn_metadata,
        create_fast_prefill_custom_backend,
        compute_causal_conv1d_metadata,
        get_per_layer_parameters,
    )
}


@pytest.fixture
def package(monkeypatch):
    """Puts modules of these contents where vLLM's would be; other modules of vLLM are not there."""

    def put(version="0.32.0", **contents):
        vllm._their.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        root = ModuleType("vllm")
        root.__version__ = version
        root.__path__ = []
        parents = {"vllm": root}
        for name, values in contents.items():
            parts = name.split(".")
            for end in range(2, len(parts) + 1):
                parents.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end]))).__path__ = []
            vars(parents[name]).update(values)
        for name, module in parents.items():
            monkeypatch.setitem(sys.modules, name, module)

    yield put
    vllm._their.cache_clear()


@pytest.fixture
def newer(package):
    """A stand-in of a newer version, in which one known departure is repaired."""
    package(
        **{
            "vllm.v1.attention.backends.utils": FUNCTIONS,
            "vllm.v1.attention.backend": {"CommonAttentionMetadata": Metadata, "UBatchSlice": UBatchSlice},
            "vllm.v1.worker.ubatch_utils": {"slice_query_start_locs": reference.slice_query_start_locs},
            "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": AttentionLayerBase},
        }
    )
    return load_provider("vllm")


@pytest.mark.parametrize("key", FUNCTIONS)
def test_only_the_form_is_another(newer, key):
    seen = examine_subject(replace(newer, departures=Departures()), BY_KEY[key], SETTING)
    if key == "compute_causal_conv1d_metadata":  # its parameters have other names, which is the difference
        assert seen.first.question == "its parameters"
    else:
        assert seen.first is None
    assert seen.counts == {"equal": seen.questions}


def test_older_forms_are_translated_as_they_are_found(package):
    names = ["CommonAttentionMetadata", "UBatchSlice", *FUNCTIONS]
    package(**{"vllm.v1.attention.backends.utils": {name: getattr(reference, name) for name in names}})
    older = load_provider("vllm")
    for key in FUNCTIONS:
        seen = examine_subject(older, BY_KEY[key], SETTING)
        assert (key, seen.first, seen.counts) == (key, None, {"equal": seen.questions})


def test_what_is_fixed_is_stale(newer):
    seen = examine_subject(newer, BY_KEY["slice_query_start_locs"], SETTING)
    assert (seen.first, seen.stale) == (None, DEPARTURES.known["slice_query_start_locs"])


PATCHED = """\
from vllm.v1.attention.backends.utils import split_attn_metadata as right
from vllm.v1.worker.ubatch_utils import slice_query_start_locs
def split_attn_metadata(ubatch_slices, common_attn_metadata):
    made = right(ubatch_slices, common_attn_metadata)
    for each in made:
        each.max_seq_len -= 1
    return made
"""


@pytest.mark.usefixtures("newer")
def test_a_file_of_its_functions_gets_its_objects(tmp_path):
    path = tmp_path / "patched.py"
    path.write_text(PATCHED)
    found = load_provider(f"vllm:{path}")
    assert (found.name, found.version) == ("vllm:patched", "0.32.0, changed by patched.py")
    seen = examine_subject(found, BY_KEY["split_attn_metadata"], SETTING)
    assert seen.first.differences[0].place == "returned[0].max_seq_len"
    repaired = examine_subject(found, BY_KEY["slice_query_start_locs"], SETTING)
    assert (repaired.first, len(repaired.stale)) == (None, 1)
    assert found.version != found.departures.version  # so that the run notes what is stale, and goes on
    assert found.find("make_local_attention_virtual_batches") is None
    assert found.departures.why_gone("subclass_attention_metadata") is None


@pytest.mark.parametrize(("ref", "why"), [("vllm:nothing", "vllm:path/to/file.py"), ("vllm:absent.py", "cannot read")])
def test_what_is_no_file_of_its_functions_is_refused(newer, ref, why):
    with pytest.raises(ProviderLoadError, match=why):
        load_provider(ref)


def test_a_missing_vllm_and_a_broken_one_are_reported(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ProviderLoadError, match="provider 'vllm'"):
        load_provider("vllm")

    package()

    def broken(name):
        if name == "vllm.v1.attention.backend":
            raise ImportError("no libcuda")
        return sys.modules["vllm"]

    monkeypatch.setattr(vllm.importlib, "import_module", broken)
    with pytest.raises(ProviderLoadError, match="no libcuda"):
        load_provider("vllm")
