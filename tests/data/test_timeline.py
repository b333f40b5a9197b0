"""Time steps, and the rule that samples are exactly one step apart."""

import numpy as np
import pandas as pd
import pytest

from sfno_dist.data import DataError
from sfno_dist.data.timeline import TimeStep, period, sequences


def test_steps_are_read_from_text():
    assert TimeStep.parse("6 hours") == TimeStep(6, "hours")
    assert TimeStep.parse(" 1 month ") == TimeStep(1, "months")
    assert str(TimeStep(1, "months")) == "1 month" and str(TimeStep(6, "hours")) == "6 hours"


@pytest.mark.parametrize("text", ["6", "six hours", "0 hours", "-1 day", "6 minutes", ""])
def test_steps_that_make_no_sense_are_refused(text):
    with pytest.raises(DataError, match="time step"):
        TimeStep.parse(text)


@pytest.mark.parametrize(
    ("time", "step", "steps"),
    [
        ("2020-01-31T06", TimeStep(1, "months"), 1),
        ("1991-11-17T15:30", TimeStep(1, "months"), 27),
        ("2020-02-28T18", TimeStep(6, "hours"), 3),
        ("2019-12-31", TimeStep(5, "days"), 2),
        ("2020-03-31", TimeStep(3, "months"), -1),
    ],
)
def test_advancing_agrees_with_pandas_calendar_arithmetic(time, step, steps):
    expected = pd.Timestamp(time) + pd.DateOffset(**{step.unit: step.count * steps})
    assert step.advance(np.datetime64(time), steps) == expected.to_datetime64()


def test_gaps_never_make_a_pair():
    times = pd.date_range("2020-01-01", periods=20, freq="6h").delete([4, 11, 12]).values
    pairs = sequences(times, TimeStep(6, "hours"), 1)
    apart = times[pairs[:, 1]] - times[pairs[:, 0]]
    assert np.all(apart == np.timedelta64(6, "h"))
    assert len(pairs) == 19 - 2 - 3  # a gap of one time costs two pairs, a gap of two costs three
    assert len(sequences(times, TimeStep(6, "hours"), 3)) == sum(
        all(t + np.timedelta64(6 * n, "h") in set(times) for n in range(4)) for t in times
    )


def test_wider_steps_pair_times_that_lie_so_far_apart():
    times = pd.date_range("2020-01-01", periods=9, freq="6h").values
    pairs = sequences(times, TimeStep(12, "hours"), 2)
    assert pairs.tolist() == [[i, i + 2, i + 4] for i in range(5)]


def test_months_pair_by_calendar_month_at_any_day():
    times = np.array(["1990-11-16T03", "1990-12-17T15:30", "1991-01-01T02", "1991-03-31"], dtype="datetime64[ns]")
    assert sequences(times, TimeStep(1, "months"), 1).tolist() == [[0, 1], [1, 2]]


def test_times_within_one_month_are_refused_for_monthly_steps():
    times = np.array(["1990-11-16", "1990-11-17"], dtype="datetime64[ns]")
    with pytest.raises(DataError, match="closer together"):
        sequences(times, TimeStep(1, "months"), 1)


def test_a_period_counts_its_last_date_whole():
    first, last = period("1982", "1989-12", "data.splits.train")
    assert first == np.datetime64("1982-01-01") and np.datetime64("1989-12-31T23:59") < last < np.datetime64(
        "1990-01-01"
    )
    first, last = period("2020-01-01T06", "2020-01-01T06", "x")
    assert first <= np.datetime64("2020-01-01T06") <= last


@pytest.mark.parametrize(
    ("dates", "words"), [(("1990", "1989"), "ends before it begins"), (("late", "1990"), "dates read")]
)
def test_impossible_periods_are_refused(dates, words):
    with pytest.raises(DataError, match=f"data.splits.test.*{words}"):
        period(*dates, "data.splits.test")
