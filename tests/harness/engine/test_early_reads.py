"""An observer names readings of slots that are not written yet."""

from toy_engine import BLOCK, ToyEngine, serve


class AttendsBeforeItWrites(ToyEngine):
    """The keys of one step are written after its attention, in one layer."""

    act = None
    late = ()

    def write(self, key, value, cache, slots):
        if self.act is None and self.step >= 5 and cache is self.caches["full.0"]:
            self.act, self.late = self.step, (key, value, cache, slots)
        else:
            super().write(key, value, cache, slots)

    def run_layer(self, layer, group, batch, ids):
        super().run_layer(layer, group, batch, ids)
        if self.late:
            super().write(*self.late)
            self.late = ()


class ReadsOneMore(ToyEngine):
    """One decode sees a slot behind its last key."""

    act = None

    def seq_len(self, request, rows):
        right = super().seq_len(request, rows)
        if self.act is None and self.step >= 5 and rows == 1 and right % BLOCK:
            self.act = (self.step, request.name)
        return right + (self.act == (self.step, request.name))


def test_keys_that_are_read_before_they_are_written_are_named():
    result, engine = serve(AttendsBeforeItWrites, num_drafts=0, blocks=40)
    assert {(each.kind, each.step, each.layer) for each in result.findings} == {("output", engine.act, "full.0")}
    assert {each.cause for each in result.findings} == {"the keys of the step are read before they are written"}
    assert {each.note for each in result.findings} == {
        "the pages hold the right keys and values, but are read wrongly or the attention is wrong"
    }


def test_a_key_behind_the_last_is_named():
    result, engine = serve(ReadsOneMore, num_drafts=0, blocks=40)
    assert {(each.kind, each.step, each.request_id) for each in result.findings} == {("output", *engine.act)}
    assert {each.cause for each in result.findings} == {"the row sees 1 key too many, behind its own"}
