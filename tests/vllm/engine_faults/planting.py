"""Plants faults in methods of vLLM: what a fault did, the rows of a step, and where a fault may act."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

LATER = 4
"""Times that a fault may act, before it does: the engine is in the middle of its work then."""

WATCHED = 6
"""Steps that are watched after the act; further ones are served without, to compare the tokens."""


@dataclass
class Acts:
    """What a fault did: the step, the request, the first position, and the physical block that it concerns.

    seen: times that it could act. after: times that it lets pass. is_judging: whether the observer is at work, which
    calls the cache writer too.
    """

    runner: GPUModelRunner
    did: list[dict] = field(default_factory=list)
    step: int = 0
    seen: int = 0
    after: int = 10**9
    is_judging: bool = False

    @property
    def is_near(self) -> bool:
        """Whether it has acted, or may act in the next step."""
        return bool(self.did) or self.seen >= self.after - 2

    @property
    def is_over(self) -> bool:
        """Whether its effect is seen by now."""
        return bool(self.did) and self.step > self.did[0]["step"] + WATCHED

    def due(self, after: int = LATER) -> bool:
        """Return whether to act now: once, after some times."""
        self.after = after
        self.seen += 1
        return not self.did and self.seen > after

    def note(self, request_id, position=None, block_id=None, *, step=None):
        """Keep what was done."""
        act = {"step": self.step if step is None else step, "request_id": request_id}
        self.did.append(act | {"position": position, "block_id": block_id})

    def request_at(self, place):
        """Return the request at a place of the batch."""
        return self.runner.input_batch.req_ids[place]

    def note_first(self, position=None, block_id=None):
        """Keep what was done to the rows of the first request."""
        self.note(self.request_at(0), position, block_id)


@dataclass(frozen=True)
class Fault:
    """A fault, and the engine in which it is planted."""

    name: str
    engine: str
    plant: Callable[[Acts], None] | None


FAULTS: dict[str, Fault] = {}


def fault(engine="full"):
    """Register a function that plants a fault: it takes the acts."""

    def register(plant):
        FAULTS[plant.__name__] = Fault(plant.__name__, engine, plant)
        return plant

    return register


def around(owner, name, wrapper):
    """Replace a method by ``wrapper(original, *args, **keywords)``."""
    original = owner.__dict__[name]

    @wraps(original)
    def replaced(*args, **keywords):
        return wrapper(original, *args, **keywords)

    setattr(owner, name, replaced)


# Rows of a step, as model runner V1 has them.


@dataclass
class Rows:
    """The rows of one request in a step. ``place``: in the batch; ``first``: its first row."""

    request_id: str
    place: int
    first: int
    count: int
    computed: int
    num_prompt: int
    num_known: int

    @property
    def is_decode(self):
        """Whether it has no prompt token, so that its rows are a sampled token and drafts."""
        return self.computed >= self.num_prompt


def rows_of(runner):
    """Return the rows of each request of the step that is prepared."""
    batch, starts = runner.input_batch, runner.query_start_loc.np
    return [
        Rows(
            request_id,
            place,
            int(starts[place]),
            int(starts[place + 1] - starts[place]),
            int(batch.num_computed_tokens_cpu[place]),
            int(batch.num_prompt_tokens[place]),
            runner.requests[request_id].num_tokens,
        )
        for place, request_id in enumerate(batch.req_ids)
    ]


def block_of(runner, rows, position):
    """Return the physical block of a position."""
    table = runner.input_batch.block_table[0]
    return int(table.block_table.np[rows.place, position // table.block_size])


def block_size_of(runner):
    """Return the tokens of a block."""
    return runner.input_batch.block_table[0].block_size


def is_long_decode(runner, rows):
    """Whether a request has one row, far from both ends of its block."""
    size = block_size_of(runner)
    return rows.is_decode and rows.count == 1 and rows.computed > 70 and 3 < rows.computed % size < size - 3


# Where a fault acts.


def once_prepared(acts, choose, act, after=LATER):
    """Act on the first request of a step that ``choose`` accepts.

    ``act`` returns the first position that is wrong, and its physical block if one is.
    """

    def prepare(original, runner, *args, **keywords):
        made = original(runner, *args, **keywords)
        rows = next((each for each in rows_of(runner) if choose(runner, each)), None)
        if rows is not None and acts.due(after):
            acts.note(rows.request_id, *act(runner, rows))
        return made

    around(GPUModelRunner, "_prepare_inputs", prepare)


def when_prepared(choose=is_long_decode, after=LATER):
    """Register a function that acts as :func:`once_prepared` describes."""

    def register(act):
        FAULTS[act.__name__] = Fault(act.__name__, "full", lambda acts: once_prepared(acts, choose, act, after))
        return act

    return register


def when_built(after=2):
    """Register a function that changes the metadata of one step.

    It returns changed metadata, the place of the request that is wrong, and its position and block; or None.
    """

    def register(change):
        def plant(acts):
            def build(original, builder, common_prefix_len, common, fast_build=False):
                made = change(common)
                if made is not None and acts.due(after):
                    common, place, *where = made
                    acts.note(acts.request_at(place), *where)
                return original(builder, common_prefix_len, common, fast_build)

            around(CPUAttentionMetadataBuilder, "build", build)

        FAULTS[change.__name__] = Fault(change.__name__, "full", plant)
        return change

    return register


def once_written(acts, change, impl=CPUAttentionBackendImpl, slots_at=4, block_size=32):
    """Change the arguments of one call of the cache writer in a step. ``slots_at``: where among them the slots are."""

    def write(original, own, *args):
        slots = args[slots_at]
        if acts.step and not acts.is_judging and len(slots) > 1 and acts.due(12):
            acts.note_first(None, int(slots[0]) // block_size)
            args = change(*args)
        return original(own, *args)

    around(impl, "do_kv_cache_update", write)


def once_attended(acts, name, change, choose=lambda impl, metadata: True, after=12):
    """Run the attention of one layer in one step with another value of an attribute."""

    def forward(original, impl, layer, query, key, value, cache, metadata, *args, **keywords):
        right = getattr(impl, name)
        if metadata is not None and choose(impl, metadata) and acts.due(after):
            setattr(impl, name, change(right))
            acts.note_first()
        try:
            return original(impl, layer, query, key, value, cache, metadata, *args, **keywords)
        finally:
            setattr(impl, name, right)

    around(CPUAttentionBackendImpl, "forward", forward)
