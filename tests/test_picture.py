"""The drawing of a recorded run shows what the record says."""

from xml.etree import ElementTree

from laboratory.picture import Fault, Life, draw
from laboratory.record import Report, Term

SVG = "{http://www.w3.org/2000/svg}"
FIRST = Term("poller", 11, 1, 101.0, 104.0, 300)
SECOND = Term("poller", 12, 2, 105.0, 110.0, 500)
LIVES = [Life("A & co", 11, 100.0, 104.0), Life("B", 12, 100.0, 110.0)]


def drawn(*terms: Term) -> ElementTree.Element:
    faults = [Fault("SIGKILL", 11, 104.0)]
    return ElementTree.fromstring(draw("Two <replicas>", Report({"poller": list(terms)}), ["poller"], LIVES, faults))


def place(term: Term) -> tuple[float, float, float]:
    """Left, right and top of a term's bar."""
    for bar in drawn(FIRST, SECOND).iter(f"{SVG}rect"):
        tip = bar.findtext(f"{SVG}title") or ""
        if tip.startswith(f"poller, epoch {term.epoch}:"):
            left = float(bar.attrib["x"])
            return left, left + float(bar.attrib["width"]), float(bar.attrib["y"])
    raise AssertionError(f"no bar for {term}")


def test_bars_stand_in_the_lane_of_their_replica_and_keep_the_proportions_of_time() -> None:
    first, second = place(FIRST), place(SECOND)
    second_of_time = (first[1] - first[0]) / 3
    assert round((second[1] - second[0]) / second_of_time, 1) == 5
    assert round((second[0] - first[1]) / second_of_time, 1) == 1, "the time without a leader can be seen"
    assert second[2] > first[2], "another lane"


def test_a_fault_is_marked_at_its_moment() -> None:
    picture = drawn(FIRST, SECOND)
    (mark,) = (line for line in picture.iter(f"{SVG}line") if line.attrib["class"] == "fault")
    assert float(mark.attrib["x1"]) == place(FIRST)[1]
    assert "SIGKILL" in [text.text for text in picture.iter(f"{SVG}text")]


def test_names_are_text_and_not_markup() -> None:
    assert drawn(FIRST).findtext(f"{SVG}title") == "Two <replicas>"
