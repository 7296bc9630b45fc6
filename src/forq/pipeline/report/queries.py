"""The SQL queries of a report, over the views that figures.py creates. {from_us} and the like are numbers of the span.

events → steps (with the previous and the next event) → ended (one row per attempt) → attempts (with run times)
"""

from forq.pipeline import verbs
from forq.pipeline.verbs import quoted

MAX_CAUSES = 25
MAX_JOBS_LISTED = 15

AFTER_CLAIM = quoted(*verbs.AFTER_CLAIM)
SUCCEEDED, FAILED = quoted(*verbs.SUCCEEDED), quoted(*verbs.FAILED)

# `ready_us`: time of the event that made the job ready, or its due time. `promoted` counts only if the event before it
# is not in the report's period. A worker runs the jobs that it settles in one entry one after the other: `until_us` is
# the end of a run, assuming that the later ones followed without a pause.
STEPS = f"""
select queue, epoch, verb, us, until_us, job, fence, attempt,
  lead(verb) over life as next_verb, lead(us) over life as next_us, lead(until_us) over life as next_until_us,
  lead(micros) over life as next_micros,
  lead(cause) over life as next_cause, lag(verb) over life as previous_verb, micros, cause,
  coalesce(
    last_value(ready_us) ignore nulls over before,
    last_value(if(verb = 'promoted', us, null)) ignore nulls over before
  ) as ready_us
from (
  select *, unix_micros(time) as us,
    case when verb = 'scheduled' then unix_micros(due)
      when verb in ({quoted(*verbs.READY_AT_ONCE)}) then unix_micros(time) end as ready_us,
    unix_micros(time) - coalesce(sum(if(verb in ('done', 'retried', 'dead'), micros, 0)) over (
      partition by queue, epoch, sequence order by position rows between 1 following and unbounded following
    ), 0) as until_us
  from report_events
  where verb in ('enqueued', 'unblocked', 'revived', 'scheduled', 'promoted', 'claimed', {AFTER_CLAIM})
)
window life as (partition by queue, epoch, job order by sequence, position),
  before as (
    partition by queue, epoch, job order by sequence, position rows between unbounded preceding and 1 preceding
  )
"""

# The second part: attempts that were claimed before the report's period.
ENDED = f"""
select queue, epoch, job, attempt, fence, us as claimed_us, greatest(0, us - ready_us) as wait_us,
  next_verb as verb, next_us as ended_us, next_until_us as until_us, next_micros as micros, next_cause as cause
from report_steps where verb = 'claimed'
union all
select queue, epoch, job, attempt, fence, null, null, verb, us, until_us, micros, cause
from report_steps where previous_verb is null and verb in ({AFTER_CLAIM}) and fence > 0
"""

ATTEMPTS = f"""
select *,
  case when verb in ({quoted(*verbs.CUT_SHORT, "deleted")})
    then coalesce(micros, ended_us - coalesce(claimed_us, {{from_us}})) else micros end as run_us
from (
  select ended.queue, job, attempt, fence, claimed_us, wait_us, micros, cause,
    if(verb is null and deleted_us is not null, 'deleted', verb) as verb, coalesce(ended_us, deleted_us) as ended_us,
    coalesce(until_us, deleted_us) as until_us
  from report_ended as ended left join (
    select queue, epoch, unix_micros(time) as deleted_us from report_events where verb = 'deleted'
  ) as deletion on ended.queue = deletion.queue and ended.epoch = deletion.epoch
)
"""

PERCENTILES = """
percentile_approx(wait_us, array(0.5, 0.9, 0.99), 2000) as wait,
percentile_approx(run_us, array(0.5, 0.9, 0.99), 2000) as run
"""

TIMES = f"""
select name, bucket, grouping_id() as level, {PERCENTILES}
from (
  select *, div(coalesce(claimed_us, ended_us) - {{origin_us}}, {{step_us}}) as bucket from report_attempts
)
group by name, bucket grouping sets ((name, bucket), (bucket), ())
"""

TIMES_OF_QUEUES = f"select queue, sum(run_us) as busy_us, {PERCENTILES} from report_attempts group by queue"

SERIES = f"""
select name, div(unix_micros(time) - {{origin_us}}, {{step_us}}) as bucket,
  count_if(verb = 'enqueued') as enqueued, count_if(verb in ({SUCCEEDED})) as done
from report_events where verb in ('enqueued', {SUCCEEDED}) group by name, bucket
"""

# Per bucket: `net` is the change in running jobs from its start to its end, `area` the running time added by runs that
# began or ended in it, `highest` the peak relative to its start. Ends sort before starts of the same microsecond: a
# worker that continues with its next job counts once.
RUNNING = """
select name, bucket, sum(change) as net, sum(change * (ends_us - us)) as area, max(level) as highest
from (
  select *, sum(change) over (partition by name, bucket order by us, change) as level
  from (
    select *, least({origin_us} + (bucket + 1) * {step_us}, {to_us}) as ends_us
    from (
      select explode(array(name, '')) as name, us, change, div(us - {origin_us}, {step_us}) as bucket
      from (
        select name, greatest({from_us}, if(ended_us is null, claimed_us, until_us - run_us)) as us, 1 as change
        from report_attempts where run_us is not null or ended_us is null
        union all
        select name, greatest({from_us}, until_us), -1 from report_attempts where run_us is not null
      )
    )
  )
)
group by name, bucket order by name, bucket
"""

# A job buried by a claim has no run time, so max_by may be null.
CAUSES = f"""
select verb, cause, count(*) as count, count(distinct queue) as queues,
  array_distinct(array_compact(array(max_by(job, ended_us), min_by(job, ended_us), max_by(job, run_us)))) as examples
from report_attempts where verb in ({FAILED}, 'suspected', 'interrupted')
group by verb, cause order by count desc, verb, cause limit {MAX_CAUSES}
"""

LISTED = "select queue, job, attempt, verb, cause, run_us, wait_us, ended_us from report_attempts"
SLOWEST = f"{LISTED} where run_us is not null order by run_us desc, ended_us limit {MAX_JOBS_LISTED}"
DEAD = f"{LISTED} where verb = 'dead' order by ended_us desc limit {MAX_JOBS_LISTED}"
