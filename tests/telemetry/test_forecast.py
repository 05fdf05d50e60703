"""The forecast of a run's time against runs whose seconds are known, added up one by one."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxmarl_llm.telemetry.backends import Panel
from jaxmarl_llm.telemetry.forecast import Forecast, Schedule
from jaxmarl_llm.telemetry.logger import Logger

SCHEDULE = Schedule((("stage 0", 20), ("training", 60)), lambda n: n >= 20 and n % 10 == 0, lambda n: n and n % 15 == 0)
SECONDS = {"stage 0": 0.5, "training": 2.0}
EVALUATION, SAVE, COMPILE = 3.0, 0.7, 9.0


def rows(noise=lambda step: 0.0):
    """Metrics of each step, and the seconds after the last row: an evaluation and save after the end are in both."""
    out = []
    for step in range(1, 61):
        phase = "stage 0" if step <= 20 else "training"
        row = {"time/step": SECONDS[phase] * (1 + noise(step))}
        if step in (1, 21):
            row |= {"time/compile": COMPILE}
            row["time/step"] += COMPILE
        before = step - 1
        if before in (20, 30, 40, 50) or step == 60:
            row["time/evaluation"] = EVALUATION + 4 * (before == 20)  # the first one is slower
            row["time/step"] += row["time/evaluation"]
        if before in (15, 30, 45):
            row["time/save"] = SAVE
            row["time/step"] += SAVE
        out.append(row)
    return out


def left(known, step):
    """Seconds to the end of the phase, by adding them up. The save after the last step is in no row."""
    end = 20 if step <= 20 else 60
    return sum(row["time/step"] for row in known[step:end]) + SAVE * (end == 60 and step < 60)


def test_a_regular_run_is_predicted_exactly_once_its_parts_are_known():
    forecast, known = Forecast(SCHEDULE), rows()
    for step, row in enumerate(known, 1):
        forecast.see(step, row)
        # Step 16 has the first save, 31 the first evaluation without a compilation.
        if 16 <= step <= 20 or step >= 31:
            assert forecast.seconds(step) == pytest.approx(left(known, step)), step
        if step in (1, 21):  # one step, which compiled: what it took without that
            assert forecast.seconds(step) == pytest.approx(
                (20 - step) * 0.5 if step == 1 else (60 - step) * 2.0 + 4 * 7.0 + 3 * SAVE
            )


def test_noise_and_a_slow_step_stay_within_a_fifth():
    draw = np.random.default_rng(0).normal(0, 0.15, 61)
    noise = lambda step: draw[step] + 5 * (step == 25)  # one step is six times slower
    forecast, known = Forecast(SCHEDULE), rows(noise)
    for step, row in enumerate(known, 1):
        forecast.see(step, row)
        if 30 <= step <= 50:
            assert forecast.seconds(step) == pytest.approx(left(known, step), rel=0.2), step


def test_a_run_whose_steps_keep_compiling_is_told_so():
    """A step takes 8 s and compiles for 0 to 40 s: a forecast of plain steps alone would be a third of the truth."""
    draw = np.random.default_rng(1)
    compiled = [90.0, *(draw.uniform(0, 40, 59) * (draw.random(59) < 0.8))]
    forecast, rows = (
        Forecast(Schedule((("training", 60),))),
        [{"time/step": 8 + c, "time/compile": c} for c in compiled],
    )
    for step, row in enumerate(rows, 1):
        forecast.see(step, row)
        if 20 <= step <= 40:
            assert forecast.seconds(step) == pytest.approx(sum(r["time/step"] for r in rows[step:]), rel=0.4), step
    once = Forecast(Schedule((("training", 60),)))
    for step in range(1, 31):  # one late compilation, of an evaluation, is soon forgotten
        once.see(step, {"time/step": 2.0 + 30 * (step == 11), "time/compile": 30.0 * (step == 11)})
    assert once.seconds(30) == 60.0


def test_where_most_steps_compile_one_short_step_is_no_forecast():
    forecast = Forecast(Schedule((("training", 20),)))
    for step in range(1, 11):
        short = step == 7
        forecast.see(step, {"time/step": 2.0 if short else 25.0, "time/compile": 0.0 if short else 15.0})
    assert forecast.seconds(10) == pytest.approx(10 * (10 + 15 * 8 / 9))


def test_a_phase_forgets_the_steps_of_the_one_before():
    forecast = Forecast(SCHEDULE)
    for step in range(1, 21):
        forecast.see(step, {"time/step": 0.5})
    assert forecast.seconds(20) == 0.0 and forecast.seconds(15) == 2.5
    forecast.see(21, {"time/step": 2.0})
    assert forecast.seconds(21) == 78.0  # no evaluation has been seen, and no save


def test_the_console_names_a_phase_that_is_not_the_last_and_shows_its_loss():
    console = Console(file=io.StringIO(), width=200)
    panel = Panel(console, SCHEDULE)
    panel.write(4, {"sft/nll": 0.25, "time/step": 3.0})
    panel.write(58, {"reward/total": 0.5, "time/step": 3.0})
    first, last = console.file.getvalue().splitlines()
    assert first == "step 4/60 loss 0.25 3 s/step eta 48s of stage 0"
    assert last == "step 58/60 reward 0.5 3 s/step eta 6s"


def test_compilations_are_timed_apart(tmp_path):
    with Logger(tmp_path, resume_step=None, total_steps=2, primary=False) as logger:
        jax.jit(lambda x: jnp.sin(x) * 17)(jnp.ones(3)).block_until_ready()
        compiles, plain = logger.log(1, {}), logger.log(2, {})
        assert 0 < compiles["time/compile"] <= compiles["time/step"] and "time/compile" not in plain
    jax.jit(lambda x: jnp.cos(x) * 19)(jnp.ones(3)).block_until_ready()
    assert "time/compile" not in logger.log(3, {})  # the listener is gone


def test_a_trace_within_a_trace_is_counted_once(tmp_path):
    trace, compiled = (f"/jax/core/compile/{part}_duration" for part in ("jaxpr_trace", "backend_compile"))
    with Logger(tmp_path, resume_step=None, total_steps=1, primary=False) as logger:
        for event, seconds in ((trace, 0.5), (trace, 1.0), (trace, 4.0), (compiled, 2.0)):
            jax.monitoring.record_event_duration_secs(event, seconds)
        assert logger.log(1, {})["time/compile"] == pytest.approx(6.0, abs=1e-2)  # the first two ran within the third


def test_the_study_compares_with_the_seconds_that_were_left():
    """Exact from the second step that is compared on; no row has the last save, and no forecast here."""
    from experiments.studies.time_to_end import errors

    known = rows()
    stage_0, training = errors(SCHEDULE, [{"step": i, **row} for i, row in enumerate(known, 1)])
    assert (len(stage_0.errors), len(training.errors)) == (8, 28)  # steps 10 to 17, and 30 to 57
    assert stage_0.seconds == sum(row["time/step"] for row in known[:20])
    np.testing.assert_allclose(stage_0.errors[-2:], 0, atol=1e-9)  # the save of step 15 is in the row of step 16
    np.testing.assert_allclose(training.errors[1:], 0, atol=1e-9)


def test_the_study_has_compilations_apart():
    from experiments.studies.time_to_end import errors

    def training(compiles):
        known = rows()
        if compiles:
            known[45] |= {"time/compile": COMPILE, "time/step": known[45]["time/step"] + COMPILE}
        return errors(SCHEDULE, [{"step": i, **row} for i, row in enumerate(known, 1)])[1]

    with_it, without = training(True), training(False)
    np.testing.assert_allclose(with_it.errors, without.errors, atol=1e-9)
    assert (with_it.compiled[:16] < without.compiled[:16] - 0.05).all()  # steps 30 to 45; the compilation is in step 46
    np.testing.assert_allclose(with_it.compiled[16:], without.compiled[16:], atol=1e-9)
