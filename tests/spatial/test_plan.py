from psamil.spatial import Layout
from psamil.spatial.blocks import SLOTS
from psamil.spatial.plan import Plan
from tests.spatial.cases import positions


def test_plan_covers_all_blocks_in_bounded_chunks():
    blocks = Layout.of(positions("continuous", 2000)).bags[0].scattered
    plan = Plan(blocks, 4.0, window=0)
    chunks = list(plan.chunks(10_000))
    assert [chunk.first for chunk in chunks[1:]] == [chunk.last for chunk in chunks[:-1]]
    assert (chunks[0].first, chunks[-1].last) == (0, len(blocks.bag))
    for chunk in chunks:
        assert len(chunk.keys) == (chunk.last - chunk.first) * chunk.length
        assert chunk.length * (chunk.last - chunk.first) * SLOTS <= 10_000 or chunk.last - chunk.first == 1
