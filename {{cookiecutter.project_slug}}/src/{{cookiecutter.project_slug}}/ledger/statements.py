"""Every statement of the ledger."""

NOW = "select clock_timestamp()"

SKIP = """
insert into {{cookiecutter.project_slug}}.job_run (job, period, state) values (%(job)s, %(period)s, 'skipped')
on conflict do nothing
"""

LAST_PERIODS = """
select job, (select max(period) from {{cookiecutter.project_slug}}.job_run as run where run.job = known.job)
from unnest(%(jobs)s::text[]) as known (job)
"""

UNFINISHED = """
select job, period from {{cookiecutter.project_slug}}.job_run as run
where state in ('running', 'retry')
    and job = any(%(jobs)s::text[])
    and period >= clock_timestamp() - %(memory)s::interval
    and (retry_at <= clock_timestamp() or {{cookiecutter.project_slug}}.is_abandoned(run))
order by period, job
"""

# A leader takes the job's lock for the length of its transaction; who comes from outside holds it in a session already.
ALONE = """
select case when %(outside)s then true else pg_try_advisory_xact_lock(%(lock)s::bigint) end
    and not exists (
        select from {{cookiecutter.project_slug}}.job_run as other
        where job = %(job)s and period <> %(period)s and state = 'running'
            and not {{cookiecutter.project_slug}}.is_abandoned(other)
    )
"""

# One statement, so that two who claim at once are told apart by the primary key alone. A loser waits until the winner's
# transaction ends, and the loser of a transaction that was rolled back gets the run.
CLAIM = """
insert into {{cookiecutter.project_slug}}.job_run as run
    (job, period, state, attempt, role, epoch, instance, started_at, finished_at)
select
    %(job)s, %(period)s, %(state)s, 1, %(role)s::text, %(epoch)s::bigint, %(instance)s::text, clock_timestamp(),
    case when %(state)s = 'succeeded' then clock_timestamp() end
on conflict (job, period) do update set
    state = excluded.state,
    attempt = run.attempt + 1,
    role = excluded.role,
    epoch = excluded.epoch,
    instance = excluded.instance,
    started_at = excluded.started_at,
    finished_at = excluded.finished_at,
    retry_at = null
where %(force)s or run.retry_at <= clock_timestamp() or {{cookiecutter.project_slug}}.is_abandoned(run)
returning attempt, started_at
"""

# Only the attempt that we started: after a takeover the row is somebody else's.
FINISH = """
update {{cookiecutter.project_slug}}.job_run
set state = 'succeeded', finished_at = clock_timestamp()
where job = %(job)s and period = %(period)s and attempt = %(attempt)s and state in ('running', 'succeeded')
    and epoch is not distinct from %(epoch)s::bigint and instance is not distinct from %(instance)s::text
"""

# An insert where the attempt was claimed in the transaction that has just been rolled back.
FAIL = """
insert into {{cookiecutter.project_slug}}.job_run as run
    (job, period, state, attempt, role, epoch, instance, started_at, finished_at, retry_at, error)
select
    %(job)s, %(period)s, case when %(retry)s::interval is null then 'failed' else 'retry' end, %(attempt)s,
    %(role)s::text, %(epoch)s::bigint, %(instance)s::text, %(started_at)s, clock_timestamp(),
    clock_timestamp() + %(retry)s::interval, %(error)s::text
on conflict (job, period) do update set
    state = excluded.state,
    attempt = excluded.attempt,
    role = excluded.role,
    epoch = excluded.epoch,
    instance = excluded.instance,
    started_at = excluded.started_at,
    finished_at = excluded.finished_at,
    retry_at = excluded.retry_at,
    error = excluded.error
where (
        run.state = 'running' and run.attempt = excluded.attempt
        and run.epoch is not distinct from excluded.epoch and run.instance is not distinct from excluded.instance
    )
    or (run.state <> 'succeeded' and run.attempt < excluded.attempt)
"""

# Writes nothing where nothing has changed.
PLAN = """
with gone as (
    delete from {{cookiecutter.project_slug}}.job where %(forget)s and role = %(role)s and name <> all(%(names)s::text[])
)
insert into {{cookiecutter.project_slug}}.job (name, role, schedule, next_period)
select name, %(role)s, schedule, next_period
from unnest(%(names)s::text[], %(schedules)s::text[], %(next)s::timestamptz[]) as plan (name, schedule, next_period)
where (name, %(role)s, schedule, next_period) not in (
    select name, role, schedule, next_period from {{cookiecutter.project_slug}}.job
)
on conflict (name) do update set
    role = excluded.role, schedule = excluded.schedule, next_period = excluded.next_period
"""

# The names by one look into the index for each, however many rows there are.
LAST_RUNS = """
with recursive ran as (
    (select job from {{cookiecutter.project_slug}}.job_run order by job limit 1)
    union all
    select (select run.job from {{cookiecutter.project_slug}}.job_run as run where run.job > ran.job order by job limit 1)
    from ran where ran.job is not null
)
select
    coalesce(job.name, ran.job) as job, job.schedule, job.next_period,
    case when job.next_period < clock_timestamp()
        then extract(epoch from clock_timestamp() - job.next_period)::float8 end as overdue_seconds,
    last.period, last.state, last.attempt, last.instance, last.started_at, last.finished_at, last.retry_at, last.error,
    success.period as success_period, success.finished_at as success_at,
    extract(epoch from clock_timestamp() - success.finished_at)::float8 as success_age_seconds
from (select ran.job from ran where ran.job is not null) as ran
full join {{cookiecutter.project_slug}}.job on job.name = ran.job
left join lateral (
    select * from {{cookiecutter.project_slug}}.job_run as run
    where run.job = coalesce(job.name, ran.job) and run.state <> 'skipped' order by run.period desc limit 1
) as last on true
left join lateral (
    select * from {{cookiecutter.project_slug}}.job_run as run
    where run.job = coalesce(job.name, ran.job) and run.state = 'succeeded' order by run.period desc limit 1
) as success on true
order by 1
"""

HISTORY = """
select period, state, attempt, role, epoch, instance, started_at, finished_at, retry_at, error,
    extract(epoch from finished_at - started_at)::float8 as seconds
from {{cookiecutter.project_slug}}.job_run
where job = %(job)s and (%(period)s::timestamptz is null or period = %(period)s)
order by period desc limit %(limit)s
"""
