"""A report's figures are right, its page stands alone and says what it shows."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from kimicore.errors import ConfigError
from kimicore.sim.charts import Chart, Line, Mark
from kimicore.sim.figures import jain, quantiles, spread
from kimicore.sim.html import page, write_page
from kimicore.sim.loads import poisson, with_tiers
from kimicore.sim.report import SimReport
from kimicore.sim.settings import SimConfig
from kimicore.sim.simulator import simulate


@pytest.fixture(scope="module")
def report() -> SimReport:
    """A busy minute of three tiers and four tenants, some of it refused."""
    trace = with_tiers(poisson(12.0, 60.0, seed=4, tenants=4))
    return simulate(trace, config=SimConfig(kv_blocks=200, max_batch_size=16, max_waiting=20, ttft_s={"standard": 0.5}))


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(1, 5)), min_size=1, max_size=40))
def test_quantiles_are_those_of_the_written_out_list(pairs: list[tuple[float, int]]) -> None:
    """A value that counts n times is n values; a quantile is the value at its rank."""
    found = quantiles([value for value, _ in pairs], [count for _, count in pairs])
    written = sorted(value for value, count in pairs for _ in range(count))
    assert found is not None
    for name, at in {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}.items():
        assert found[name] == written[math.ceil(at * len(written)) - 1]
    assert found["max"] == written[-1]
    assert found["mean"] == pytest.approx(sum(written) / len(written))


def test_fairness_has_its_known_values() -> None:
    """Equal shares give 1, one of four that has everything gives a quarter."""
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([]) == 1.0
    assert (spread([2.0, 5.0]), spread([2.0]), spread([0.0, 1.0])) == (2.5, 1.0, math.inf)
    assert quantiles([]) is None


def test_goodput_counts_requests_that_met_both_targets(report: SimReport) -> None:
    """Counted anew from the outcomes, by tier."""
    config = report.config
    for tier, own in report.summary()["tiers"].items():
        mine = [one for one in report.outcomes if one.request.tier == tier]
        good = [
            one
            for one in mine
            if one.ttft_s is not None and one.ttft_s <= config.ttft_s[tier] and (one.tpot_s or 0.0) <= config.tpot_s
        ]
        assert own["goodput"]["share"] == pytest.approx(len(good) / len(mine))
    assert 0.0 < report.summary()["goodput"]["share"] < 1.0


def test_a_report_is_json(report: SimReport) -> None:
    """Every figure survives JSON, with no value that JSON does not know."""
    figures = report.summary()
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["requests"] == len(report.outcomes)
    assert figures["fairness"]["tenants"] == 4


def test_a_report_can_leave_the_first_requests_out(report: SimReport) -> None:
    """From the middle on, only later requests and the steps after their first arrival count."""
    half = len(report.outcomes) // 2
    later = evolve(report, first=half)
    figures = later.summary()
    assert figures["requests"] == len(report.outcomes) - half
    from_s = report.outcomes[half].request.arrived_s
    tokens = sum(one.request.output_tokens for one in report.outcomes[half:] if one.finished_s)
    assert figures["output_tokens_per_s"] == pytest.approx(tokens / (report.makespan_s - from_s))
    before = next(one for one in report.record.samples if one.now_s >= from_s)
    count = sum(report.record.gap_tokens[before.gaps :])
    assert figures["gap_s"]["mean"] == pytest.approx(
        math.fsum(
            s * n
            for s, n in zip(report.record.gaps_s[before.gaps :], report.record.gap_tokens[before.gaps :], strict=True)
        )
        / count
    )


def test_the_table_tells_the_figures(report: SimReport) -> None:
    """Counts and each tier stand in it."""
    text, figures = report.table(), report.summary()
    assert f"{figures['finished']} finished of {figures['requests']}" in text
    assert f"{figures['refused']['overloaded']} refused" in text
    assert all(f"{tier}: " in text for tier in ("interactive", "standard", "background"))


class _Page(HTMLParser):
    """Checks that tags close, and gathers what a page refers to and shows."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_page_stands_alone(report: SimReport, tmp_path: Path) -> None:
    """It is well formed, has six plots with titles, axes with units and legends, and asks for nothing outside."""
    path = tmp_path / "page.html"
    write_page(path, report, title="a <busy> minute")
    found = _Page()
    found.feed(path.read_text())
    assert found.open == []
    assert found.references == []
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert "url(" not in path.read_text()
    assert found.tags.count("svg") == found.tags.count("figure") == 6
    shown = " ".join(found.text)
    for text in ("a <busy> minute", "seconds (logarithmic)", "share of requests", "interactive target", "running"):
        assert text in shown


def test_a_page_of_one_request_is_a_page() -> None:
    """Nothing is divided by what is not there."""
    one = simulate(poisson(1.0, 1.0, seed=1)[:1], config=SimConfig())
    found = _Page()
    found.feed(page(one, title="one"))
    assert found.open == []


def test_a_page_that_cannot_be_written_is_refused(report: SimReport, tmp_path: Path) -> None:
    """The error names the path."""
    with pytest.raises(ConfigError, match="nowhere"):
        write_page(tmp_path / "nowhere" / "page.html", report, title="")


@example([(0.0, 5e-324)], False, False, [])
@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), max_size=30),
    st.booleans(),
    st.booleans(),
    st.lists(st.floats(0, 1e9), max_size=2),
)
def test_charts_stay_within_their_picture(
    points: list[tuple[float, float]], log_x: bool, steps: bool, marks: list[float]
) -> None:
    """Any finite values are drawn inside, and numbers are plain."""
    xs = sorted(x for x, _ in points)
    line = Line("a & b", xs, [y for _, y in points], steps)
    drawn = Chart("t", "x", "y", [line], [Mark("m", at) for at in marks], log_x).svg()
    assert bool(drawn) == bool(points)
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert "a & b" not in drawn
