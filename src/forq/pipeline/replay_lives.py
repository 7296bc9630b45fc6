"""Jobs out of their events: one row per life of a job.

An id may be used again and a dead job revived, so an id has as many lives as it has ends. What was blocked behind a
life has no row until it is a job of its own.
"""

from pyspark.sql import DataFrame, SparkSession

from forq.pipeline import verbs
from forq.pipeline.verbs import quoted

_ENDS = quoted(*verbs.ENDS)
_ABOUT_OTHERS = quoted(*verbs.ABOUT_OTHERS)

# A job that a claim buries was not tried again: what cut short its attempts says more.
_BY_CLAIM = "verb = 'dead' and micros is null and cause in ('StallError', 'TimeoutError')"

_LIVES = f"""
select life.queue, life.epoch, life.job, life.number as life, life.enqueued_at,
  case when last_verb in ({_ENDS}) then last_verb
    when deletion.time is not null then 'deleted'
    when last_verb in ({quoted(*verbs.ACTIVE)}) then 'active'
    else 'ready' end as state,
  last_verb as verb,
  case when last_verb in ({_ENDS}) then last_at else deletion.time end as ended_at,
  attempts, cause, micros, life.fence,
  case when last_verb = 'dead' then coalesce(archived.fate, if(deletion.time is null, null, 'deleted')) end as fate
from (
  select queue, epoch, job, number, min(time) as enqueued_at, max(time) as last_at,
    max_by(verb, struct(sequence, position)) as last_verb, max_by(fence, struct(sequence, position)) as fence,
    max(attempt) as attempts,
    max_by(micros, struct(sequence, position)) filter (where micros is not null) as micros,
    max_by(cause, struct(sequence, position)) filter (where cause is not null and not ({_BY_CLAIM})) as cause
  from (
    select *, coalesce(sum(if(verb in ({_ENDS}), 1, 0)) over (
      partition by queue, epoch, job order by sequence, position rows between unbounded preceding and 1 preceding
    ), 0) as number
    from {{events}} where job is not null and verb not in ({_ABOUT_OTHERS})
  )
  group by queue, epoch, job, number
) as life
left join (
  select queue, epoch, min(time) as time from {{events}} where verb = 'deleted' group by queue, epoch
) as deletion
  on life.queue = deletion.queue and life.epoch = deletion.epoch
left join (
  select queue, epoch, job, fence as of_fence, min(verb) as fate
  from {{events}} where verb in ({quoted(*verbs.ARCHIVE_ENDS)}) group by queue, epoch, job, fence
) as archived
  on life.queue = archived.queue and life.epoch = archived.epoch and life.job = archived.job
    and life.fence = archived.of_fence
"""


def job_lives(spark: SparkSession, events: DataFrame) -> DataFrame:
    """Columns: queue, epoch, job, life (from 0), enqueued_at, state, verb (the last), ended_at, attempts, cause (of the
    last attempt that failed or was cut short), micros (of the last that was measured), fence, fate.

    state: ready, active, done, released, dead, cancelled, dropped (its record was lost) or deleted (with its queue).
    fate, of a dead one: revived, discarded, forgotten or deleted; missing while it is kept.
    """
    return spark.sql(_LIVES, events=events)
