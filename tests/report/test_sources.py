"""Sources: what several have in common is listed once, and nothing is lost by that."""

from hypothesis import given
from hypothesis import strategies as st

from dgxlab.report.sources import Block, Source, blocks

FACTS = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=3, unique=True).map(tuple), max_size=4).map(tuple)
SOURCES = st.lists(st.builds(Source, st.just("source"), FACTS, st.just(("own",))), min_size=1, max_size=6)


def of(*sources: Source) -> list[Block]:
    return list(blocks(sources, conditions=True))


@given(SOURCES)
def test_every_source_has_its_facts_in_its_own_block_or_in_a_shared_one(sources: list[Source]) -> None:
    listed = of(*sources)
    for number, source in enumerate(sources, 1):
        lines = [line for block in listed if number in block.numbers for line in block.lines]
        facts = {fact for line in source.facts for fact in line}
        assert {fact for line in lines for fact in line.split(" · ")} == facts | {"own"}
    assert [block.numbers for block in listed if block.title] == [(number + 1,) for number in range(len(sources))]


@given(SOURCES)
def test_a_shared_block_spares_two_repeats_and_its_facts_are_nowhere_else(sources: list[Source]) -> None:
    listed = of(*sources)
    for block in (block for block in listed if not block.title):
        assert (len(block.numbers) - 1) * len(block.lines) > 1
        facts = {fact for line in block.lines for fact in line.split(" · ")}
        others = (line for other in listed if other is not block for line in other.lines)
        assert not facts & {fact for line in others for fact in line.split(" · ")}


def test_two_arms_of_a_session_list_only_what_differs() -> None:
    where = (("session s",), ("host h", "pin p"))
    baseline = Source("baseline", (*where, ("build 1",)), ("ran with A=0",), {"clocks.sm": (1980, 1980)})
    candidate = Source("candidate", (*where, ("build 2",)), ("ran with A=0",), {"clocks.sm": (1900, 1980)})
    assert of(baseline, candidate) == [
        Block((1, 2), "", ("session s", "host h · pin p")),
        Block((1,), "baseline", ("build 1", "ran with A=0", "median of a run: SM 1980 MHz")),
        Block((2,), "candidate", ("build 2", "ran with A=0", "median of a run: SM 1900 to 1980 MHz")),
    ]
    shown = [line for block in blocks([baseline, candidate], conditions=False) for line in block.lines]
    assert not any("median" in line for line in shown)
