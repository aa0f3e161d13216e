"""What of the published record cannot be true; every other figure of it is left alone."""

import pytest

from dgxlab import published
from dgxlab.store import Store

IMPOSSIBLE = {
    # "213 TFLOPS bf16" is what a GB10 does in fp8 and int8; in bf16 it is half of that
    (50, "compute_peak", 213.0): "213 TFLOPS are 2.0 times the 107 TFLOPS of GB10 in bf16",
    (211, "compute_peak", 213.0): "213 TFLOPS are 2.0 times the 107 TFLOPS of GB10 in bf16",
    # half of the 1 PFLOPS that are sold, which are sparse; 427 is what dense fp4 has at the clock of the others
    (214, "compute_peak high", 500.0): "500 TFLOPS are 1.2 times the 427 TFLOPS of GB10 in fp4",
    # prompts that a prefix cache answered, of a mixture with 3B active parameters, and once more in a later document
    (138, "S_PP", 99398.0): "596.4 TFLOPS are 2.8 times the 213 TFLOPS of GB10 in fp8, and more than the 427 TFLOPS",
    (144, "S_PP", 151990.0): "911.9 TFLOPS are 4.3 times the 213 TFLOPS of GB10 in fp8, and more than the 427 TFLOPS",
    (248, "S_PP", 99398.0): "596.4 TFLOPS are 2.8 times the 213 TFLOPS of GB10 in fp8, and more than the 427 TFLOPS",
    (252, "S_PP", 151990.0): "911.9 TFLOPS are 4.3 times the 213 TFLOPS of GB10 in fp8, and more than the 427 TFLOPS",
    # the same of a dense 32B model, whose W4A16 kernel multiplies in bf16
    (256, "S_PP", 5367.0): "343.5 TFLOPS are 3.2 times the 107 TFLOPS of GB10 in bf16",
    (260, "S_PP", 14941.0): "956.2 TFLOPS are 8.9 times the 107 TFLOPS of GB10 in bf16, and more than the 427 TFLOPS",
    (264, "S_PP", 21952.0): "1405 TFLOPS are 13.1 times the 107 TFLOPS of GB10 in bf16, and more than the 427 TFLOPS",
    (268, "S_PP", 24444.0): "1564 TFLOPS are 14.6 times the 107 TFLOPS of GB10 in bf16, and more than the 427 TFLOPS",
}
"""By line, metric and value: all that is flagged, each looked at."""


def test_exactly_the_impossible_figures_are_flagged(store: Store) -> None:
    """The headlines are, with the reason; no other of 1,072 figures is."""
    flagged = {(f.line, f.metric, f.value): f.excess for f in published.figures(store) if f.excess}
    assert set(flagged) == set(IMPOSSIBLE)
    assert [why for key, why in flagged.items() if IMPOSSIBLE[key] not in why] == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (52, "6600 t/s of a 32B model in fp4: 99 % of the peak, and meant as it"),
        (132, "33373 t/s of the mixture: 94 % of the fp8 peak; never reached, but not impossible"),
        (111, "273 GB/s: the peak itself"),
        (213, "427 TFLOPS: the peak itself"),
        (212, "215 TOPS of int8: the peak, measured at another clock"),
        (362, "a box whose peaks are not known"),
        (925, "a kernel at 84.6 % of the bandwidth"),
    ],
)
def test_what_could_be_true_is_not_flagged(store: Store, line: int, what: str) -> None:
    """The nearest to the peaks that are left alone."""
    (figure,) = published.figures(store, line=line)
    assert figure.excess == "", what
