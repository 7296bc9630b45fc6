"""Periodic jobs with whole supervisors: one job per tick whatever dies, ticks on time, config files, forqctl."""

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.drive.one_queue import OneQueue
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until
from tests.support.thorough import examples

QUICK = 'heartbeat = "300ms"\nexpiry = "900ms"\n'
SECONDS = float(os.environ.get("FORQ_TEST_TICKS_SECONDS", examples(8, 12)))
SEED = int(os.environ.get("FORQ_TEST_SEED", "0"))


def freeze(forq: Forq, seconds: float) -> None:
    tree = forq.processes()
    for process in tree:
        process.suspend()
    time.sleep(seconds)
    for process in tree:
        try:
            process.resume()
        except psutil.NoSuchProcess:
            continue


def ticks_with(queue: OneQueue, verb: str) -> list[int]:
    """The ticks of the jobs with this journal event, in order."""
    return [int(job.rpartition(":")[2]) for event, job in queue.journal_events() if event == verb and job]


@pytest.mark.timeout(600)
@pytest.mark.spec("M11")
def test_three_supervisors_make_one_job_per_tick_while_they_are_killed_and_frozen(
    redis_url: str, tmp_path: Path
) -> None:
    """One tick per second; supervisors are repeatedly killed and restarted, or frozen and continued."""
    chance, trace = random.Random(SEED), tmp_path / "trace"
    supervisors = [Forq(redis=redis_url, settings=QUICK, trace=trace) for _ in range(3)]
    killed = frozen = 0
    try:
        for forq in supervisors:
            forq.start()
            forq.create("q", "record")
        queue = OneQueue(redis_url)
        queue.set_options(max_retries=10, max_stalls=100)
        rule = ["--every", "1s", "--overlap", "queue", "--catch-up", "all"]
        supervisors[0].ctl("schedule", "q", "beat", *rule)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            time.sleep(chance.uniform(0.3, 1.2))
            victim = chance.choice(supervisors)
            if killed <= frozen:
                os.kill(victim.pid, signal.SIGKILL)
                assert victim.process is not None
                victim.process.wait()
                victim.start()
                killed += 1
            else:
                freeze(victim, chance.uniform(0.5, 2.5))
                frozen += 1
        supervisors[0].ctl("unschedule", "q", "beat")
        ticks = ticks_with(queue, "enqueued")
        wait_until(lambda: sorted(ticks_with(queue, "done")) == ticks, 60.0, "every job is done")
        print(f"\n{len(ticks)} ticks, {killed} kills, {frozen} freezes; {len(trace.read_text().splitlines())} runs")
        assert ticks == list(range(ticks[0], ticks[0] + 1000 * len(ticks), 1000)), "each once, in order"
        assert len(ticks) >= SECONDS - 1
        assert killed > 0
        assert frozen > 0
        queue.close()
    finally:
        for forq in supervisors:
            forq.remove()


@pytest.mark.spec("M10", "M11")
def test_ticks_are_on_time_without_polling(server: Server, redis_url: str) -> None:
    with running(redis=redis_url, settings='heartbeat = "60s"\nexpiry = "180s"\n') as forq:
        forq.create("q", "record")
        forq.wait_for_child("q")
        forq.ctl("schedule", "q", "beat", "--every", "500ms", "--overlap", "queue")
        wait_until(lambda: len(forq.traces("end")) >= 2, what="two ticks")
        with server.connect() as client:
            before = client.info("commandstats")["cmdstat_fcall"]["calls"]
            seen = len(forq.traces("end"))
            wait_until(lambda: len(forq.traces("end")) >= seen + 6, what="six ticks more")
            calls = client.info("commandstats")["cmdstat_fcall"]["calls"] - before
        # Per tick: promote, fire, and the turn that runs the job and settles it.
        assert calls <= 7 * 5, f"{calls} calls for six ticks"
        queue = forq.client().queue("q")
        late = []
        for trace in forq.traces("end"):
            tick = int(trace.job.rpartition(":")[2]) / 1000
            late.append(trace.time + time.time() - time.monotonic() - tick)
        print(f"\nlate by {[round(seconds * 1000) for seconds in late]} ms")
        # If the ticks were late, all would be; on a busy machine some workers are.
        assert sorted(late)[len(late) // 4] < 0.2
        assert min(late) > -0.005
        assert queue.schedules()[0]["missed"] == 0


@pytest.mark.spec("M11")
def test_after_a_time_without_supervisors_one_missed_tick_runs(redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        forq.create("q", "record")
        forq.ctl("schedule", "q", "beat", "--every", "1s")
        wait_until(lambda: forq.traces("end"), what="the first tick")
        forq.stop()
        seen = len(forq.traces("end"))
        last_run = forq.traces("end")[-1].time
        wait_until(lambda: time.monotonic() > last_run + 3.5, what="three ticks are missed")
        forq.start()
        wait_until(lambda: len(forq.traces("end")) > seen, what="the catch-up run")
        (shown,) = forq.client().queue("q").schedules()
        assert shown["missed"] >= 2
        assert shown["runs"] == len(forq.traces("end"))


@pytest.mark.spec("M11")
def test_schedules_of_a_config_file_are_set_at_start_and_removed_with_their_section(redis_url: str) -> None:
    table = f'[queues.q]\nhandler = "traced:record"\npath = "{HANDLERS}"\n'
    schedules = '[queues.q.schedules.often]\nevery = "1h"\n[queues.q.schedules.night]\ncron = "30 2 * * *"\n'
    with running(redis=redis_url, settings=table + schedules) as forq:
        wait_until(lambda: forq.traces("end"), what="the first tick")
        forq.ctl("schedule", "q", "mine", "--cron", "0 0 1 1 *")
        before = {one["key"]: one["next_at"] for one in forq.client().queue("q").schedules()}
        assert before.keys() == {"often", "night", "mine"}
        forq.stop()
        forq.config.write_text(table + '[queues.q.schedules.often]\nevery = "1h"\n')
        forq.start()
        wait_until(lambda: "unscheduled=['night']" in forq.log, what="the schedule without a section is removed")
        after = {one["key"]: one["next_at"] for one in forq.client().queue("q").schedules()}
        assert after == {key: before[key] for key in ("often", "mine")}, "the others are unchanged"
        assert len(forq.traces("end")) == 1
        assert "until the next start" in forq.ctl("unschedule", "q", "often")


def test_forqctl_manages_schedules(redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        forq.create("q", "record")
        shown = forq.ctl("schedule", "q", "night", "--cron", "30 2 * * *", "--zone", "Europe/Berlin", "--dry-run")
        assert [line.strip()[10:19] for line in shown.splitlines()] == ["T02:30:00"] * 5
        assert forq.ctl("schedules").splitlines()[1:] == []
        forq.ctl("schedule", "q", "night", "--cron", "30 2 * * *", "--zone", "Europe/Berlin")
        assert forq.ctl("trigger", "q", "night") == "schedule:night"
        wait_until(lambda: [trace.job for trace in forq.traces("end")] == ["schedule:night"], what="it ran")
        assert forq.ctl("schedules", "q").splitlines()[1].split()[-4:] == ["-", "0", "0", "0"]
        assert forq.run_ctl("trigger", "q", "day").returncode == 4
        assert forq.run_ctl("schedule", "q", "x", "--cron", "nonsense").returncode == 2
        forq.ctl("unschedule", "q", "night")
        assert forq.run_ctl("unschedule", "q", "night").returncode == 4


def test_a_paused_schedule_stays_paused_over_a_restart(redis_url: str) -> None:
    table = f'[queues.q]\nhandler = "traced:record"\npath = "{HANDLERS}"\n'
    often = '[queues.q.schedules.often]\nevery = "1s"\noverlap = "queue"\n'
    with running(redis=redis_url, settings=table + often) as forq:
        wait_until(lambda: forq.traces("end"), what="the first tick")
        assert forq.ctl("pause-schedule", "q", "often") == "often of q paused"
        (before,) = forq.client().queue("q").schedules()
        wait_until(lambda: len(forq.traces("end")) == before["runs"], what="the jobs of all ticks ran")
        forq.stop()
        forq.config.write_text(table + often.replace("1s", "2s"))
        forq.start()
        # A tick of another schedule shows that the queue is served, and pulse fires its ticks.
        forq.ctl("schedule", "q", "other", "--every", "1h")
        wait_until(lambda: forq.traces("end")[-1].job == "schedule:other", what="the other tick")
        rows = [line.split() for line in forq.ctl("schedules", "q").splitlines()]
        assert [row for row in rows if row[1] == "often"] == [
            ["q", "often", "every", "2s", "-", "paused", *rows[1][6:]]
        ]
        after = next(one for one in forq.client().queue("q").schedules() if one["key"] == "often")
        assert (after["paused"], after["next_at"], after["every"]) == (True, None, 2)
        assert (after["runs"], after["missed"]) == (before["runs"], before["missed"])
        assert forq.ctl("trigger", "q", "often").startswith("schedule:often:triggered:")
        seen = len(forq.traces("end"))
        assert forq.ctl("resume-schedule", "q", "often") == "often of q resumed"
        wait_until(lambda: len(forq.traces("end")) >= seen + 2, what="it fires again")
        resumed = next(one for one in forq.client().queue("q").schedules() if one["key"] == "often")
        assert (resumed["paused"], resumed["missed"]) == (False, before["missed"])


def test_a_job_that_waits_for_its_time_runs_now(redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        forq.create("q", "record")
        forq.wait_for_child("q")
        forq.client().queue("q").enqueue(1, id="later", run_in=3600)
        assert forq.ctl("run-now", "q", "later") == "later is ready"
        wait_until(lambda: [trace.job for trace in forq.traces("end")] == ["later"], what="it ran")
        ended = forq.run_ctl("run-now", "q", "later")
        assert ended.returncode == 4
        assert "later" in ended.stderr
