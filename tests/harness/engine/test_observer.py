"""An observer finds the faults of a small engine, names their place and cause, and none in the right one."""

import gc
import weakref
from dataclasses import replace

import pytest
from toy_engine import BLOCK, VOCAB, ToyEngine, serve

from attncheck.harness.engine import judge
from attncheck.harness.engine.events import KVGroup, ObserverSettings, StepPlan
from attncheck.harness.engine.findings import grouped
from attncheck.harness.engine.observer import EngineObserver


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_right_engine_has_no_finding(hybrid, num_drafts):
    result, engine = serve(hybrid=hybrid, num_drafts=num_drafts, blocks=25 if hybrid else 13)
    assert result.failure is None
    assert result.findings == ()
    assert result.not_followed == result.not_compared == {}
    layers = 4 if hybrid else 2
    assert result.steps == engine.step
    assert result.checks["output"] == layers * result.counts["rows"] == layers * result.checks["token"]
    assert result.counts["requests resumed after preemption"] > 1
    mapped = result.counts["tokens of prefix hits"] // BLOCK
    most = 2 * mapped if hybrid else mapped  # of the window's group, blocks that no row sees need not be there
    assert 0 < mapped <= result.checks["prefix_hit"] <= most
    assert 0.1 < result.worst_share < 1


class Faulty(ToyEngine):
    """A base of faults that act once: ``acts`` decides when, and ``act`` keeps what was done."""

    act = None

    def acts(self, request, *, first_step=5):
        if self.act is None and self.step >= first_step and request.done >= 2 * BLOCK:
            self.act = (self.step, request.name)
            return True
        return self.act == (self.step, request.name)


class ForgetsDrafts(Faulty):
    def seq_len(self, request, rows):
        right = super().seq_len(request, rows)
        drafts = len(request.drafts)
        return right - drafts if drafts and self.acts(request) else right


class ReadsOneShort(Faulty):
    def seq_len(self, request, rows):
        return super().seq_len(request, rows) - self.acts(request)


class PageLate(Faulty):
    def table_of(self, request, group):
        table = super().table_of(request, group)
        return table[1:] + table[-1:] if self.acts(request) else table


class OtherBlock(Faulty):
    def table_of(self, request, group):
        table = list(super().table_of(request, group))
        other = next((each for each in self.running if each is not request and each.done > BLOCK), None)
        if other is not None and self.acts(request):
            table[1] = other.table[group][0]
            self.block = request.table[group][1]
        return table


class IgnoresWindow(ToyEngine):
    def settings_of(self, layer):
        right = self.true_settings_of(layer)
        return replace(right, window=(-1, -1)) if layer == "window.1" else right


class WindowOneShort(ToyEngine):
    def settings_of(self, layer):
        right = self.true_settings_of(layer)
        return replace(right, window=(right.window[0] - 1, 0)) if layer == "window.1" else right


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (ForgetsDrafts, "the row sees 2 keys too few"),
        (ReadsOneShort, "the row sees 1 key too few"),
        (PageLate, "from number 0 of the table on, blocks are read one page late"),
        (OtherBlock, "is read in place of block {block} (number 1 of the table)"),
    ],
)
def test_a_wrong_reading_is_found_in_its_step_and_explained(fault, cause):
    result, engine = serve(fault, num_drafts=2 if fault is ForgetsDrafts else 0, blocks=40)
    step, request = engine.act
    assert {finding.kind for finding in result.findings} == {"output"}
    assert {(finding.step, finding.request_id) for finding in result.findings} == {(step, request)}
    assert {finding.layer for finding in result.findings} == {"full.0", "full.1"}
    for finding in result.findings:
        assert (
            finding.note == "the pages hold the right keys and values, but are read wrongly or the attention is wrong"
        )
        assert cause.format(block=getattr(engine, "block", None)) in finding.cause


def test_a_wrong_window_is_found_in_its_layer_only():
    for fault, cause in (
        (IgnoresWindow, "the window is ignored"),
        (WindowOneShort, "the window is one key too short (5 keys)"),
    ):
        result, _ = serve(fault, hybrid=True, blocks=60, requests=4)
        assert {(finding.kind, finding.layer) for finding in result.findings} == {("output", "window.1")}
        assert {finding.cause for finding in result.findings} == {cause}
        assert min(finding.position for finding in result.findings) >= 5  # the window hides nothing before


class WritesElsewhere(Faulty):
    """Writes the last row of a request into a slot of another's block."""

    def slots(self, request, group, rows):
        slots = super().slots(request, group, rows)
        other = next((each for each in self.running if each is not request and each.done >= 2 * BLOCK), None)
        if other is not None and self.acts(request):
            self.place, self.victim = request.done + rows - 1, (other.name, other.table[0][1], BLOCK + 1)
            slots[-1] = other.table[0][1] * BLOCK + 1
        return slots


def test_a_row_in_a_slot_of_another_request_is_found_in_both_blocks():
    result, engine = serve(WritesElsewhere, num_drafts=0, blocks=40, prefix_caching=False)
    step, name = engine.act
    writes = [finding for finding in result.findings if finding.kind == "write"]
    own = [finding for finding in writes if finding.request_id == name]
    assert {(each.step, each.position, each.num_rows) for each in own} == {(step, engine.place, 1)}
    assert {each.layer for each in own} == {"full.0", "full.1"}
    other = {(each.request_id, each.block_id, each.position) for each in writes if each.request_id != name}
    assert other == {engine.victim}
    outputs = [each for each in result.findings if each.kind == "output" and each.request_id == engine.victim[0]]
    assert outputs[0].step == step
    block = engine.victim[1]
    assert outputs[0].cause == (
        f"from position {BLOCK + 1} on, block {block} (number 1 of the table) holds "
        f"keys of request {name}, position {engine.place}"
    )
    assert outputs[0].note == f"block {block} (number 1 of the table) lacks position {BLOCK + 1}"


class WritesNothing(Faulty):
    """Writes none of the rows of a prompt."""

    def slots(self, request, group, rows):
        slots = super().slots(request, group, rows)
        if rows > 2 * BLOCK and self.acts(request):
            self.rows = rows
            return [0] * rows
        return slots


def test_pages_are_counted_whatever_number_of_their_positions_is_lacking():
    result, engine = serve(WritesNothing, num_drafts=0, blocks=40, prefix_caching=False)
    lacking = [f for f in result.findings if (f.kind, f.step, f.layer) == ("write", engine.act[0], "full.0")]
    assert sum(finding.num_rows for finding in lacking) == -(-engine.rows // BLOCK)


class KeepsDraft(Faulty):
    """Does not write the row that replaces a rejected draft."""

    def finish_step(self, request, rows, sampled):
        self.rejected = getattr(self, "rejected", {})
        drafts = len(request.drafts)
        super().finish_step(request, rows, sampled)
        self.rejected[request.name] = drafts and len(sampled) < drafts + 1

    def slots(self, request, group, rows):
        slots = super().slots(request, group, rows)
        if getattr(self, "rejected", {}).get(request.name) and self.acts(request):
            self.place = request.done
            slots[0] = 0  # a slot of block 0, which no request has
        return slots


def test_a_rejected_draft_in_the_cache_is_named():
    result, engine = serve(KeepsDraft, blocks=40, prefix_caching=False)
    step, name = engine.act
    assert {finding.request_id for finding in result.findings} == {name}
    assert {(f.step, f.position) for f in result.findings if f.kind == "write"} == {(step, engine.place)}
    causes = [finding.cause for finding in result.findings if finding.kind == "output"]
    assert causes[0].startswith(f"from position {engine.place} on, block ")
    assert causes[0].endswith(" holds a rejected draft")


class HitOneTooMany(Faulty):
    """Maps one block of another request behind a prefix hit."""

    def map_prefix(self, request):
        super().map_prefix(request)
        other = next((each for each in self.running if each.done >= BLOCK), None)
        index = len(request.table[0])
        if other is not None and index and self.act is None and len(request.tokens) > (index + 1) * BLOCK:
            self.act, self.block = (self.step, request.name, index), other.table[0][0]
            request.table[0].append(self.block)
            self.held[self.block] += 1
            request.done += BLOCK


def test_a_prefix_hit_one_block_too_long_is_found_when_it_is_mapped():
    result, engine = serve(HitOneTooMany, num_drafts=0, blocks=40)
    step, name, index = engine.act
    first = result.findings[0]
    assert (first.kind, first.step, first.request_id) == ("prefix_hit", step, name)
    assert (first.block_id, first.block_index, first.position) == (engine.block, index, index * BLOCK)
    assert first.note.startswith(f"the prefix hit maps block {engine.block}, which holds keys of request")
    assert first.note.endswith(", positions 0 to 3")
    assert {finding.kind for finding in result.findings} == {"prefix_hit"}
    assert set(result.not_followed) == {"their prefix hit maps a wrong block"}


class ReusesCachedBlock(ToyEngine):
    """Leaves a block in the prefix cache when another request gets it."""

    def take_block(self):
        block = next((each for each in self.free if self.held[each] == 0), None)
        if block is None:
            return None
        self.free.remove(block)
        self.held[block] = 1
        return block


def test_a_block_that_stays_in_the_prefix_cache_after_reuse_is_found():
    result, _ = serve(ReusesCachedBlock, num_drafts=0, blocks=16, requests=16)
    assert result.findings[0].kind == "prefix_hit"


class WrongPosition(Faulty):
    def positions(self, request, rows):
        right = super().positions(request, rows)
        return [each + 1 for each in right] if self.acts(request) else right


class WrongToken(Faulty):
    def inputs(self, request, rows):
        right = super().inputs(request, rows)
        return [(each + 1) % VOCAB for each in right] if self.acts(request) else right


@pytest.mark.parametrize(("fault", "kind"), [(WrongPosition, "position"), (WrongToken, "token")])
def test_what_the_model_is_given_is_compared(fault, kind):
    result, engine = serve(fault, num_drafts=0, blocks=40)
    [finding] = result.findings
    assert (finding.kind, finding.step, finding.request_id) == (kind, *engine.act)
    assert finding.note.startswith(f"the model is given {kind} ")


class CountsRejected(Faulty):
    """Counts one rejected draft as computed."""

    def accepted(self, request, sampled):
        is_rejected = len(sampled) <= len(request.drafts) and len(sampled) > 0
        return super().accepted(request, sampled) + (is_rejected and self.acts(request))


def test_a_count_that_forgets_a_rejected_draft_is_found_in_the_next_step():
    result, engine = serve(CountsRejected, blocks=40)
    first = result.findings[0]
    assert (first.kind, first.step, first.request_id) == ("count", engine.act[0] + 1, engine.act[1])
    assert "the scheduler counts" in first.note


def test_one_of_three_requests_is_followed_and_the_others_are_counted():
    result, _ = serve(settings=ObserverSettings(follow_one_of=3), blocks=40)
    assert result.findings == ()
    assert result.not_followed["--follow 3 leaves out the first block of their prompt"] > 0
    left_out = sum(result.not_followed.values())
    assert result.checks["output"] == 2 * (result.counts["rows"] - left_out) > 0


def test_requests_are_chosen_by_their_first_block_whatever_their_order_and_rest():
    observer = EngineObserver(ObserverSettings(follow_one_of=4))
    observer.engine_starts([KVGroup(BLOCK, ("full.0",))], {})
    chosen = {}
    for first in [*range(400), *reversed(range(400))]:  # those of the second half are added again
        names = [str(first), f"{first} later"]
        observer.request_added(names[0], [first, 1, 2, 3, *range(first % 7)])
        observer.request_added(names[1], [first, 1, 2, 3, 9, 9])
        step = observer.step_begins(StepPlan((), dict.fromkeys(names, 1)))
        observer.inputs(names, None, None)
        assert step.request_ids in ([], names)
        assert step.request_ids == chosen.setdefault(first, step.request_ids)
    assert 60 < sum(map(bool, chosen.values())) < 140


def test_every_third_step_is_judged_and_all_are_followed():
    result, engine = serve(settings=ObserverSettings(judge_every=3), blocks=14)
    assert result.findings == ()
    assert 0 < result.checks["output"] < result.checks["token"]
    late, engine = serve(OtherBlock, ObserverSettings(judge_every=1000), num_drafts=0, blocks=40)
    assert engine.act is not None
    assert late.findings == ()
    assert "output" not in late.checks


def test_memory_is_bounded_and_what_does_not_fit_is_counted():
    size = 2 * 2 * 2 * 16 * 2  # bytes of a row: two layers, keys and values of two heads of 16 bfloat16
    load = {"blocks": 150, "requests": 40, "budget": 60}
    few, _ = serve(settings=ObserverSettings(max_row_bytes=256 * size), **load)
    many, _ = serve(settings=ObserverSettings(max_row_bytes=1024 * size), **load)
    assert few.findings == many.findings == ()
    assert few.failure is many.failure is None
    assert few.not_followed["their keys and values do not fit into the memory for them"] > 0
    assert many.not_followed == {}
    assert many.counts["rows"] > 512
    assert 0 < few.checks["output"] < many.checks["output"]


class GivesTooFewBlocks(ToyEngine):
    def schedule(self):
        plan = super().schedule()
        few = tuple(replace(each, block_ids=tuple(ids[:-1] for ids in each.block_ids)) for each in plan.requests)
        return replace(plan, requests=few) if self.step == 1 else plan


def test_too_few_blocks_are_named_and_counted_as_compared():
    result, _ = serve(GivesTooFewBlocks, requests=1, blocks=60)
    [group] = grouped(result.findings)
    assert group.words == "the scheduler gives a request too few blocks"
    assert (group.findings[0].kind, result.checks["count"]) == ("count", 1)
    assert "blocks of group 0 for" in group.findings[0].note


class WritesNullBlock(ToyEngine):
    def slots(self, request, group, rows):
        return [0] * rows


def test_a_page_of_a_request_that_was_served_before_is_reported_again():
    observer = EngineObserver()
    engine = WritesNullBlock(observer, blocks=2, num_drafts=0, prefix_caching=False)
    found = []
    for _ in range(2):
        engine.add("r", [1, 2], 4)
        while engine.waiting or engine.running:
            engine.run_step()
        found.append(sum(finding.kind == "write" for finding in observer.result().findings))
    assert found == [found[0], 2 * found[0]]
    assert found[0] > 0


class WithRings(EngineObserver):
    """Is given a second group, with one block for each request."""

    def engine_starts(self, groups, layers, engine):
        super().engine_starts([*groups, KVGroup(BLOCK, ("ring",), "rings")], layers, engine)

    def step_begins(self, plan):
        rings = {True: (99,), False: ()}
        requests = tuple(replace(each, block_ids=(*each.block_ids, rings[each.starts])) for each in plan.requests)
        return super().step_begins(replace(plan, requests=requests))


def test_a_group_that_is_not_followed_may_have_one_block_for_each_request():
    rings, _ = serve(observer=lambda observer: WithRings(observer.settings), blocks=40)
    assert (rings.failure, rings.findings) == (None, ())
    assert rings.checks == serve(blocks=40)[0].checks


def test_a_finding_whose_cause_is_not_sought_states_that():
    result, _ = serve(ReadsOneShort, ObserverSettings(max_explained=1), num_drafts=0, blocks=40)
    first, *others = [finding for finding in result.findings if finding.kind == "output"]
    assert first.cause == "the row sees 1 key too few"
    assert others
    assert {(each.cause, each.note) for each in others} == {
        (None, "its cause was not sought, only those of 1 finding before it")
    }
    assert [group.words for group in grouped(result.findings)] == [
        "the row sees N key too few",
        "an output row is wrong, and its cause was not sought",
    ]


class LeavesLayersOut(ToyEngine):
    """Does not call the layers of ``left_out`` from a step on, in each step or in some."""

    left_out, from_step, every = ("full.1",), 1, 1

    def run_layer(self, layer, group, batch, ids):
        is_due = self.step >= self.from_step and self.step % self.every == 0
        if not (is_due and layer in self.left_out):
            super().run_layer(layer, group, batch, ids)


class LeavesOutSometimes(LeavesLayersOut):
    from_step, every = 4, 5


class LeavesGroupOut(LeavesLayersOut):
    left_out = ("window.0", "window.1")


@pytest.mark.parametrize("fault", [LeavesLayersOut, LeavesOutSometimes, LeavesGroupOut])
def test_a_layer_that_is_not_called_in_each_step_is_counted_and_has_no_finding(fault):
    result, _ = serve(fault, hybrid=True, blocks=80)
    reason = ("output", "layers that are not called in each step, such as those of a drafter")
    assert (result.failure, result.findings) == (None, ())
    assert list(result.not_compared) == [reason]
    rows = 4 * result.counts["rows"]
    assert result.checks["output"] + result.not_compared[reason] == rows
    assert result.not_compared[reason] >= rows // 4 * len(fault.left_out) * (fault.every == 1)


def test_the_time_of_a_step_is_bounded_and_what_is_beyond_is_counted(monkeypatch):
    right, _ = serve(blocks=60)
    monkeypatch.setitem(judge._MOST_SCORES, "cpu", 2 * 4 * 6 * 12)  # two layers of four heads, and some rows of keys
    result, _ = serve(blocks=60)
    assert (result.failure, result.findings) == (None, ())
    left_out = result.not_compared["output", "rows that see too many keys to be judged within a step"]
    assert 0 < left_out < right.checks["output"]
    assert result.checks["output"] + left_out == right.checks["output"]
    assert result.checks["token"] == right.checks["token"]


def test_a_step_whose_queries_and_outputs_are_too_large_is_followed_and_not_judged():
    size = 2 * 4 * 2 * 16 * 2  # bytes of a row's queries and outputs: two layers of four heads of 16 bfloat16
    result, _ = serve(settings=ObserverSettings(max_row_bytes=160 * size), blocks=200, budget=300, requests=16)
    assert (result.failure, result.findings) == (None, ())
    left_out = result.not_compared[
        "output", "rows of steps whose queries and outputs do not fit into the memory for them"
    ]
    assert 2 * 160 < left_out < 2 * result.counts["rows"]
    assert result.checks["output"] == 2 * result.checks["token"] - left_out > 0


def test_on_a_gpu_a_quarter_of_the_free_memory_is_used(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (4 * 64 * 2 * 2 * 2 * 16 * 2, 2**40))
    result, _ = serve(blocks=40)
    assert (result.failure, result.findings) == (None, ())
    assert result.not_followed["their keys and values do not fit into the memory for them"] > 0


def test_a_failure_frees_the_keys_and_values():
    observer = EngineObserver(ObserverSettings())
    engine = ToyEngine(observer)
    engine.add("r", [1, 2, 3, 4, 5, 6], 20)
    engine.run_step()
    assert observer.result().checks["output"] == 12
    store = weakref.ref(observer._judge)
    observer.fail(RuntimeError("out of memory"))
    gc.collect()
    assert store() is None
    result = observer.result()
    assert (result.failure, result.checks["output"]) == ("RuntimeError: out of memory", 12)


def test_nothing_is_judged_before_an_engine_starts():
    result = EngineObserver().result()
    assert (result.steps, result.checks, result.findings) == (0, {}, ())
