"""Names of what is compared: the same in a loop, a search and `watch`, and no two of a session alike."""

from __future__ import annotations

import pytest

from dgxlab.errors import UsageError
from dgxlab.judgement import names, tries
from dgxlab.lab.search import Search
from dgxlab.store import Store
from dgxlab.tools import BatchedBench, LlamaBench, ServeBench
from tests.journals import source
from tests.report.worlds import RECIPE, h200, session_of_two

JOB = "20261120-183000-h200-a"
SIZES = ((128,), (64,), (8,))
BENCH = (
    *(LlamaBench(model, (512,), (0,)) for model in ("q4k", "other")),
    *(BatchedBench("q4k", *SIZES, {"n_ubatch": (n,)}) for n in (512, 2048)),
    ServeBench("q4k", *SIZES, axes={"n_ubatch": (512,)}),
    *(LlamaBench("q4k", (16,), (0,), env=env) for env in ({}, {"A": ""})),
)
NAMES = [
    "q4k pp512",
    "other pp512",
    *(
        f"pp128 tg64 B8 {words} n_ubatch={n_ubatch}"
        for n_ubatch in (512, 2048)
        for words in ("S_PP", "S_TG batched-bench")
    ),
    "pp128 tg64 B8 S_TG serve",
    "pp16 -A",
    'pp16 A=""',
]


def test_a_try_and_a_session_tell_cells_of_one_name_apart(store: Store) -> None:
    models = {"q4k": RECIPE, "other": RECIPE}
    session = session_of_two(store, JOB, bench=BENCH, models=models).build().gates()
    session.chains(lambda step, role, cycle: 100 + cycle % 2 - 50 * (role == "candidate")).gates(after=True).end()
    assert names.of_verdicts(store, JOB) == NAMES
    try_id = tries.begin(store, ("h200", "h200"), "why", source(), diff="", change="", parent=None)
    tries.put_session(store, try_id, tries.CHAIN, JOB)
    told = tries.told(store, try_id)
    assert [cell["name"] for cell in told["cells"]] == told["regressed"] == NAMES


@pytest.mark.parametrize(("cell", "fits"), [("pp512", NAMES[:2]), ("pp128 tg64 B8", NAMES[2:7]), ("pp16", NAMES[-2:])])
def test_a_search_tells_cells_of_one_name_apart(cell: str, fits: list[str]) -> None:
    whole = h200(bench=BENCH, models={"q4k": RECIPE, "other": RECIPE})
    with pytest.raises(UsageError) as refused:
        Search((cell,)).of_one(whole, whole)
    assert refused.value.message == f"{cell} is {len(fits)} comparisons: {', '.join(fits)}"
    assert [Search((name,)).of_one(whole, whole).name for name in fits] == fits
